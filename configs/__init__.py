"""mmengine config files; `subquad.tools.config.find` locates them in an installed package."""
