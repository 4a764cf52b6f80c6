"""Who answers: one module per engine, and beside it the launcher that runs in the engine's own environment."""
