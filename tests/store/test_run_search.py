"""The list of runs: filtered, sorted and grouped by any field, and quick with 10,000 runs."""

import pytest
from sqlalchemy import event

from lorimer.errors import InvalidInput
from lorimer.store import metrics, run_curves, run_search, runs, tracking
from lorimer.store.run_search import Scope
from lorimer.store.tables import run_fields, run_metrics, run_tags, tracked_runs
from lorimer.store.tables import runs as runs_table
from lorimer.types.runs import RunIdentity, UpdateRunRequest
from tests.store.runs import NOW, SHAPE, make_part

RUNS = [
    {"name": "ant", "tags": ["insect", "small"], "config": {"rate": 0.1, "model": {"name": "a b"}, "flag": True}},
    {"name": "bee", "tags": ["insect"], "config": {"rate": 0.02, "note": "8"}, "notes": "it Flies 100%"},
    {"name": "cat", "config": {"rate": "auto"}},
    {"name": "dog"},
]


@pytest.fixture
def zoo(store, session):
    parts = [store.write_now(make_part, session, n, RunIdentity(**values)) for n, values in enumerate(RUNS)]
    for number, part in enumerate(parts[:3]):
        reports, names = metrics.encode_reports(
            [metrics.Report(0, 1.0, {"nll": 5.0}), metrics.Report(1, 2.0, {"nll": number})]
        )
        store.write_now(metrics.report, part.model_id, reports, names, max_names=9, max_values=99)
        store.write_now(run_curves.store_summary, part.run_id, store.read_now(run_curves.advance, part.run_id).parts)
    store.write_now(tracking.finish, parts[1].run_id, "failed", "no honey")
    return {values["name"]: part for values, part in zip(RUNS, parts, strict=True)}


@pytest.fixture
def names(store, user, zoo):
    def names(query="", sort="created", archived=False, fields=(), limit=99, offset=0):
        scope = Scope(user.user_id, NOW, archived, query)
        found, total = store.read_now(run_search.list_runs, scope, sort=sort, fields=fields, limit=limit, offset=offset)
        assert total >= len(found)
        return [one.run.name for one in found]

    return names


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", ["ant", "bee", "cat", "dog"]),
        ("FLIES", ["bee"]),
        ("100%", ["bee"]),
        ("a%t", []),
        ("tag=insect", ["ant", "bee"]),
        ("tag!=insect", ["cat", "dog"]),
        ("tag=", ["cat", "dog"]),
        ("status=failed", ["bee"]),
        ("status!=failed", ["ant", "cat", "dog"]),
        ("config.rate>0.05", ["ant"]),
        ("config.rate<=0.1", ["ant", "bee"]),
        ("config.rate=auto", ["cat"]),
        ("config.rate=", ["dog"]),
        ("config.rate!=", ["ant", "bee", "cat"]),
        ('config.model.name="a b"', ["ant"]),
        ("config.flag=true", ["ant"]),
        ("config.note=8", []),
        ("last.nll<2 tag=insect", ["ant", "bee"]),
        ("last.nll>=1 min.nll<2", ["bee"]),
        ("max.nll=5", ["ant", "bee", "cat"]),
        ("name=dog", ["dog"]),
        ("base_model=tiny ant", ["ant"]),
        ("created>2020-01-01T00:00:00Z", ["ant", "bee", "cat", "dog"]),
        ("duration<1000", ["ant", "bee", "cat", "dog"]),
        ("steps=", ["dog"]),
    ],
)
def test_queries(names, query, expected):
    assert names(query) == expected


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("-created", ["dog", "cat", "bee", "ant"]),
        ("-name", ["dog", "cat", "bee", "ant"]),
        ("config.rate", ["bee", "ant", "cat", "dog"]),
        ("-config.rate", ["ant", "bee", "cat", "dog"]),
        ("-last.nll", ["cat", "bee", "ant", "dog"]),
        ("min.nll", ["ant", "bee", "cat", "dog"]),
        ("status", ["bee", "dog", "cat", "ant"]),
    ],
)
def test_sorting_puts_missing_values_last(names, sort, expected):
    assert names(sort=sort) == expected


def test_pages_and_archived_runs(store, names, zoo):
    assert names(limit=2, offset=1) == ["bee", "cat"]
    store.write_now(tracking.change, zoo["bee"].run_id, UpdateRunRequest(is_archived=True))
    assert names() == ["ant", "cat", "dog"]
    assert names(archived=True) == ["bee"]
    assert names(archived=None) == ["ant", "bee", "cat", "dog"]


def test_the_id_of_every_part_is_found(names, store, session, zoo):
    assert names(zoo["cat"].model_id) == ["cat"]
    store.write_now(make_part, session, 8, RunIdentity(run_key="k", name="elk"))
    part = store.write_now(make_part, session, 9, RunIdentity(run_key="k"))
    assert names(part.model_id) == ["elk"]


def test_chosen_fields_have_values(store, user, zoo):
    fields = ["config.rate", "last.nll", "status", "config.model.name"]
    found, _ = store.read_now(
        run_search.list_runs, Scope(user.user_id, NOW), sort="created", fields=fields, limit=9, offset=0
    )
    assert [list(one.values.values()) for one in found] == [
        [0.1, 0.0, "running", "a b"],
        [0.02, 1.0, "failed", None],
        ["auto", 2.0, "running", None],
        [None, None, "running", None],
    ]


@pytest.mark.parametrize(
    "query", ["config.=1", "loss<3", "last.nll=low", "status=dead", "created>yesterday", "tag>a", "steps>x"]
)
def test_wrong_queries_are_refused(names, query):
    with pytest.raises(InvalidInput, match="accepted"):
        names(query)


@pytest.mark.parametrize("sort", ["tag", "loss", "-config."])
def test_wrong_sorts_are_refused(names, sort):
    with pytest.raises(InvalidInput):
        names(sort=sort)


def test_groups(store, user, session, zoo):
    def groups(by, query=""):
        return store.read_now(run_search.group_runs, Scope(user.user_id, NOW, query=query), by)

    assert groups("tag") == [("insect", 2), (None, 2), ("small", 1)] or groups("tag") == [
        (None, 2),
        ("insect", 2),
        ("small", 1),
    ]
    assert dict(groups("config.rate")) == {"0.1": 1, "0.02": 1, "auto": 1, None: 1}
    assert groups("status", "config.rate!=") == [("running", 2), ("failed", 1)]
    assert groups("session") == [(session.session_id, 4)]
    with pytest.raises(InvalidInput, match=r"not grouped by 'last\.nll'"):
        groups("last.nll")


def test_names_of_fields(store, user, zoo):
    config, measured, tags = store.read_now(run_search.field_names, Scope(user.user_id, NOW))
    assert config == ["flag", "model.name", "note", "rate"]
    assert (measured, tags) == (["nll"], ["insect", "small"])
    assert store.read_now(run_search.field_names, Scope(user.user_id, NOW, query="dog")) == ([], [], [])


def test_others_runs_are_not_listed(store, zoo):
    assert store.read_now(run_search.list_runs, Scope("nobody", NOW), sort="created", fields=(), limit=9, offset=0) == (
        [],
        0,
    )


NUM_RUNS = 10_000


def fill(c, user_id, session_id):
    """Insert many runs, each with a tag, ten fields and five metrics."""
    now = runs.utc_now()
    ids = [f"{session_id}:train:{number}" for number in range(NUM_RUNS)]
    shape = SHAPE | {"base_model": "tiny", "user_metadata": {}, "is_unloaded": False, "snapshot_seq": -1}
    times = {"created_at": now, "last_request_at": now}
    c.execute(
        runs_table.insert(),
        [
            shape
            | times
            | {"model_id": one, "run_id": one, "session_id": session_id, "user_id": user_id, "model_seq_id": n}
            for n, one in enumerate(ids)
        ],
    )
    row = {"user_id": user_id, "notes": "", "tags": ["t"], "config": {}, "base_model": "tiny", "session_id": session_id}
    row |= {"num_parts": 1, "past_seconds": 0.0, "is_archived": False, "created_at": now}
    c.execute(
        tracked_runs.insert(),
        [
            row | {"run_id": one, "model_id": one, "number": n, "name": f"run-{n}", "search": f"run-{n}"}
            for n, one in enumerate(ids)
        ],
    )
    c.execute(run_tags.insert(), [{"run_id": one, "tag": f"t{n % 7}"} for n, one in enumerate(ids)])
    c.execute(
        run_fields.insert(),
        [
            {"run_id": one, "field": f"f{k}", "number": n % (k + 2), "text": str(n % (k + 2))}
            for n, one in enumerate(ids)
            for k in range(10)
        ],
    )
    c.execute(
        run_metrics.insert(),
        [
            {"run_id": one, "name": f"m{k}", "last": n / (k + 1), "last_step": 1}
            for n, one in enumerate(ids)
            for k in range(5)
        ],
    )


def test_ten_thousand_runs_stay_quick(store, user, session):
    if store.read_now(lambda c: c.dialect.name) != "sqlite":
        pytest.skip("only SQLite counts the instructions of a query")
    store.write_now(fill, user.user_id, session.session_id)

    def instructions(function, *args, **options):
        """Return how many thousand instructions of SQLite's virtual machine a read takes."""
        ticks = []

        def counted(c):
            raw = c.connection.dbapi_connection
            raw.set_progress_handler(lambda: ticks.append(1), 1000)
            try:
                function(c, *args, **options)
            finally:
                raw.set_progress_handler(None, 0)

        store.read_now(counted)
        return len(ticks)

    def request(query, sort):
        scope = Scope(user.user_id, NOW, query=query)
        return scope, {"sort": sort, "fields": ["config.f1", "last.m1"], "limit": 50, "offset": 0}

    def listed(query, sort):
        scope, options = request(query, sort)
        return store.read_now(run_search.list_runs, scope, **options)

    assert [one.run.name for one in listed("", "-last.m2")[0][:2]] == ["run-9999", "run-9998"]
    assert listed("config.f3=4 tag=t0", "config.f1")[1] == sum(n % 5 == 4 and n % 7 == 0 for n in range(NUM_RUNS))
    found = {}
    for query, sort in (
        ("", "-created"),
        ("", "-last.m2"),
        ("config.f3=4", "config.f1"),
        ("run-77", "name"),
        ("status=running", "-duration"),
    ):
        scope, options = request(query, sort)
        found[query, sort] = instructions(run_search.list_runs, scope, **options)
    scope = Scope(user.user_id, NOW)
    found["groups"] = instructions(run_search.group_runs, scope, "config.f3")
    found["fields"] = instructions(run_search.field_names, scope)
    # A plain page reads its own rows and counts the others; the rest may look at each run, but not at pairs of them.
    assert found.pop(("", "-created")) < 70
    assert max(found.values()) < 1600, found


def rows_read(c, function, *args, **options):
    """Return how many rows PostgreSQL reads from tables and indices for a question."""
    asked = []

    def note(connection, cursor, statement, parameters, *_):
        asked.append((statement, parameters))

    event.listen(c, "before_cursor_execute", note)
    try:
        function(c, *args, **options)
    finally:
        event.remove(c, "before_cursor_execute", note)

    def total(node):
        below = sum(total(one) for one in node.get("Plans", []))
        if "Scan" not in node["Node Type"] or node["Node Type"].startswith("Bitmap Index"):
            return below
        removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
        return below + (node["Actual Rows"] + removed) * node["Actual Loops"]

    plans = [
        c.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters).scalar_one()[0]["Plan"]
        for statement, parameters in asked
    ]
    return sum(map(total, plans))


def test_ten_thousand_runs_read_few_rows_of_postgresql(store, user, session):
    if store.read_now(lambda c: c.dialect.name) != "postgresql":
        pytest.skip("only PostgreSQL counts the rows of a plan")
    store.write_now(fill, user.user_id, session.session_id)
    store.write_now(lambda c: c.exec_driver_sql("ANALYZE"))
    found = {}
    for query, sort in (
        ("", "-created"),
        ("", "-last.m2"),
        ("config.f3=4", "config.f1"),
        ("run-77", "name"),
        ("status=running", "-duration"),
    ):
        scope = Scope(user.user_id, NOW, query=query)
        options = {"sort": sort, "fields": ["config.f1", "last.m1"], "limit": 50, "offset": 0}
        found[query, sort] = store.read_now(rows_read, run_search.list_runs, scope, **options)
    scope = Scope(user.user_id, NOW)
    found["groups"] = store.read_now(rows_read, run_search.group_runs, scope, "config.f3")
    found["fields"] = store.read_now(rows_read, run_search.field_names, scope)
    # A plain page reads its own rows and counts the others; the rest may look at each run, but not at pairs of them.
    assert found.pop(("", "-created")) < 1.2 * NUM_RUNS, found
    assert max(found.values()) < 20 * NUM_RUNS, found
