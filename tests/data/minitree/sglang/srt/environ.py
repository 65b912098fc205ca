"""Settings that are read from the environment."""

import os


class EnvBool:
    def __init__(self, name: str, default: bool) -> None:
        self.name = name
        self.default = default

    def get(self) -> bool:
        text = os.environ.get(self.name)
        return self.default if text is None else text.lower() in ("1", "true")


class Envs:
    SGLANG_MINI_SKIP_MASK = EnvBool("SGLANG_MINI_SKIP_MASK", False)


envs = Envs()
