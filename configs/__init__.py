"""mmengine config files; `subquad.tools.engine.config.find` locates them in an installed package."""
