# Rules that plugins bring, a module each: rule `count` of the plugin `hello` is called `hello_count`.
for plugin, its in PLUGIN_RULES.items():
    prefix = f"{plugin}_"

    module:
        name: plugin
        snakefile:
            its.snakefile
        config:
            its.config

    use rule * from plugin as prefix*
