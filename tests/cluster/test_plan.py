"""Which workers a configuration needs, and what Ray reserves for each."""

import pytest

from lorimer.cluster.plan import Resources, namespace_of, plan_workers
from lorimer.errors import InvalidInput
from lorimer.server.setting_sources import load_settings

CONFIG = """
database = "postgresql://lorimer:secret@db/lorimer"
cluster = "ray"
device = "cuda"
[model."small"]
replicas = 3
[model."large"]
ranks = 8
num_threads = 2
sampler = { kind = "vllm", replicas = 2, tensor_parallel = 4 }
"""


def settings(tmp_path, text: str = CONFIG, **flags: object):
    path = tmp_path / "lorimer.toml"
    path.write_text(text)
    return load_settings(flags, {}, path).settings


def test_a_worker_for_each_replica_with_the_devices_of_its_processes(tmp_path):
    workers = plan_workers(settings(tmp_path), "/etc/lorimer.toml", has_gpus=False)
    found = [(worker.replicas, worker.resources) for worker in workers]
    assert found == [
        (("large#0",), Resources(8, 16, 0)),
        (("large#sampler-0",), Resources(4, 8, 0)),
        (("large#sampler-1",), Resources(4, 8, 0)),
        (("small#0",), Resources(1, 1, 0)),
        (("small#1",), Resources(1, 1, 0)),
        (("small#2",), Resources(1, 1, 0)),
    ]
    assert workers[0].flags == (
        *("--config", "/etc/lorimer.toml"),
        *("--set=worker_claims=large#0", "--set=worker_replicas=1"),
    )


def test_several_replicas_of_one_kind_share_a_worker_and_its_node(tmp_path):
    workers = plan_workers(settings(tmp_path, worker_replicas=2), "/c", has_gpus=False)
    assert [worker.replicas for worker in workers] == [
        ("large#0",),
        ("large#sampler-0", "large#sampler-1"),
        ("small#0", "small#1"),
        ("small#2",),
    ]
    assert [worker.resources.num_gpus for worker in workers] == [8, 8, 2, 1]
    assert "--set=worker_claims=small#0,small#1" in workers[2].flags


def test_device_auto_is_a_gpu_where_the_cluster_has_some(tmp_path):
    given = settings(tmp_path, device="auto", num_threads=3, memory_bytes=2**30)
    (first, *_) = plan_workers(given, "/c", has_gpus=True)
    assert first.resources == Resources(8, 16, 0)
    (first, *_, last) = plan_workers(given, "/c", has_gpus=False)
    assert first.resources == Resources(0, 16, 8 * 2**30)
    assert last.resources == Resources(0, 3, 2**30)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"device": "cpu"}, "num_threads of 'small' is 0, which takes all cores"),
        ({"device": "mps"}, "device of 'small' is 'mps'; with cluster 'ray' auto, cpu and cuda are accepted"),
    ],
)
def test_what_ray_cannot_reserve_is_refused(tmp_path, flags, message):
    with pytest.raises(InvalidInput, match=message):
        plan_workers(settings(tmp_path, **flags), "/c", has_gpus=False)


def test_workers_of_one_node_have_ports_and_directories_of_their_own(tmp_path):
    given = settings(tmp_path, worker_metrics_port=9100, objects="s3://b/c", data=tmp_path / "data")
    workers = plan_workers(given, "/c", has_gpus=False)
    flags = [dict(flag.removeprefix("--set=").split("=", 1) for flag in worker.flags[2:]) for worker in workers]
    assert sorted(one["worker_metrics_port"] for one in flags) == [str(9100 + number) for number in range(6)]
    assert len({one["data"] for one in flags}) == 6
    assert flags[0]["data"] == str(tmp_path / "data" / "workers" / "large-0")


def test_a_changed_setting_makes_other_workers_and_the_same_ones_do_not(tmp_path):
    first = plan_workers(settings(tmp_path), "/c", has_gpus=False)
    assert plan_workers(settings(tmp_path), "/c", has_gpus=False) == first
    second = plan_workers(settings(tmp_path, max_context=512), "/c", has_gpus=False)
    assert {worker.name for worker in first}.isdisjoint(worker.name for worker in second)
    assert first[0].name.startswith("large#0@")


def test_installations_differ_by_their_database_and_not_by_its_password(tmp_path):
    first = namespace_of(settings(tmp_path))
    assert first == namespace_of(settings(tmp_path, CONFIG.replace("secret", "other")))
    assert first != namespace_of(settings(tmp_path, CONFIG.replace("@db/", "@other/")))


def test_resources_fit_only_where_each_of_them_does():
    node = Resources(4, 8, 2**30)
    assert Resources(4, 8, 2**30).fits(node)
    for large in (Resources(5, 0, 0), Resources(0, 9, 0), Resources(0, 0, 2**31)):
        assert not large.fits(node)
    assert str(node) == "4 GPU, 8 CPU, 1.0 GiB"
    assert str(Resources(0, 1, 0)) == "1 CPU"
