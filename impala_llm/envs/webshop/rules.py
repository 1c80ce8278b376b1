"""Rule-based shoppers as baselines: a policy that does not beat them has not learned to read the pages."""

from typing import Any

from impala_llm.envs.webshop.shopper import NOT_OPTIONS, first_instruction, read_instruction


class FirstHit:
    """Searches for the whole instruction, opens the first hit and buys it. For one episode.

    Args:
        with_options: click those options first that the instruction names.
    """

    def __init__(self, with_options: bool = False) -> None:
        self._with_options = with_options
        self._instruction = ""
        self._clicked: set[str] = set()

    def act(self, observation: str, info: dict[str, Any]) -> str:
        """Choose the action for an observation; `info` must hold `available_actions`.

        Raises:
            ValueError: the first observation shows no instruction.
        """
        available = info["available_actions"]
        if not self._instruction:
            self._instruction = first_instruction(observation)
        if available["has_search_bar"]:
            return f"search[{self._instruction}]"
        others = [name for name in available["clickables"] if name not in NOT_OPTIONS]
        if "buy now" not in available["clickables"]:
            return f"click[{others[0]}]" if others else "click[back to search]"
        if self._with_options:
            wish = read_instruction(self._instruction)
            for value in others:
                if wish.wants(value) and value not in self._clicked:
                    self._clicked.add(value)
                    return f"click[{value}]"
        return "click[buy now]"
