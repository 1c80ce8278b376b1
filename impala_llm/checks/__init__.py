"""Checks of settings, before any process starts: why they cannot work, or would have no effect. Without torch.

- settings_checks: rules between settings; settings_cautions: warnings about what is likely to fail
- idle_settings: those that others keep from having an effect
- familiar_names: the setting that an unknown word means; known_models: reasons against a model, by its config.json
- own_problems: what a credit or loss, which may be the user's own code, says against the other settings
"""
