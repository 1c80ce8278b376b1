import pytest

from impala_llm.bench import webshop


@pytest.mark.system
def test_small_run_in_a_child_process():
    figures, rows = webshop.run({"products": "60", "episodes": "5", "load": "2000"})
    assert set(figures) == {"steps_per_s", "load_2k_s", "load_2k_gb"}
    assert rows
