"""WebShop (Yao et al., 2022, arXiv:2207.01206) in pure Python: the shop, its goals, its search and its reward."""

from impala_llm.envs.webshop.analyzer import analyze
from impala_llm.envs.webshop.catalogue import (
    Catalogue,
    CatalogueError,
    Goal,
    Product,
    load_catalogue,
    records_to_catalogue,
)
from impala_llm.envs.webshop.env import WebShopEnv
from impala_llm.envs.webshop.reward import RewardParts, score_purchase
from impala_llm.envs.webshop.splits import solvable_goals, split_goals
from impala_llm.envs.webshop.synthetic import synthetic_catalogue

__all__ = [
    "Catalogue",
    "CatalogueError",
    "Goal",
    "Product",
    "RewardParts",
    "WebShopEnv",
    "analyze",
    "load_catalogue",
    "records_to_catalogue",
    "score_purchase",
    "solvable_goals",
    "split_goals",
    "synthetic_catalogue",
]
