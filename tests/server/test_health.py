"""Alive and ready are different questions."""

from lorimer.errors import StorageError


async def test_alive(start):
    async with start() as running:
        answer = await running.http.get("/api/v1/healthz")
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_ready_while_engines_wait_for_their_first_use(start):
    async with start() as running:
        answer = await running.http.get("/readyz")
        assert (answer.status_code, answer.json()) == (200, {"status": "ready", "reasons": []})


async def test_model_that_cannot_be_loaded_is_a_reason(start, tmp_path):
    async with start(models=(f"gone={tmp_path}/none.gguf",), start_engines="eager") as running:
        answer = await running.http.get("/readyz")
        assert answer.status_code == 503
        assert "'gone' is being loaded" in answer.json()["reasons"][0]
        try:
            await running.context.scheduler.model_info("gone")
        except Exception:
            answer = await running.http.get("/readyz")
        assert answer.status_code == 503
        assert "'gone' could not be loaded" in answer.json()["reasons"][0]
        assert (await running.http.get("/api/v1/healthz")).status_code == 200


async def test_shutting_down_and_a_lost_database_are_reasons(start, monkeypatch):
    async with start() as running:
        running.context.is_draining = True

        async def refuse(*_):
            raise StorageError("the connection to 10.0.0.1 is lost")

        monkeypatch.setattr(running.context.store, "read", refuse)
        answer = await running.http.get("/readyz")
        monkeypatch.undo()
        running.context.is_draining = False
        assert answer.status_code == 503
        assert answer.json()["reasons"] == ["the server is shutting down", "the database cannot be read"]
