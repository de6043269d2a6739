"""The workflow with a server that answers: its address may change, and its key leaves no trace."""

import pytest

from fake_endpoint import FakeEndpoint, completion, serving
from workflow import Run, tiny_config

KEY = "sk-very-secret-0123456789"
UNTIL = ("--until", "generate_responses")


@pytest.mark.slow
def test_a_server_moves_and_nothing_is_rerun(tiny_target, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    config = tiny_config(tiny_target)
    run = Run(tmp_path / "run", config)
    run.write_data()

    def served_at(url: str | None, **settings) -> None:
        config["responses"] |= {"backend": "openai", "openai": {"base_url": url} | settings}
        run.write_config(config)

    with serving(FakeEndpoint(lambda body: completion(body, [9, 8, 2]))) as endpoint:
        served_at(endpoint.url)
        output = run.snakemake(*UNTIL).stdout
        assert len(endpoint.bodies) == 20 + 4 + 6
        assert set(endpoint.authorizations) == {f"Bearer {KEY}"}
    served_at("http://node7:8000/v1", concurrency=2, retries=0, api_key_env="ANOTHER")
    assert run.stale(*UNTIL) == {}
    monkeypatch.setenv("OPENAI_BASE_URL", "http://node8:8000/v1")
    served_at(None)
    assert run.stale(*UNTIL) == {}
    served_at(None, model="another")
    assert run.stale(*UNTIL) == {"generate_responses": 2 + 1 + 1}
    assert KEY not in output
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
