"""Manifests: each fits its schema, and what is said in two places is the same."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from app.cli import main
from app.config import EldrConfig, load_config
from app.model_facts import model_facts

ROOT = Path(__file__).parents[3]
K8S = ROOT / "k8s"
README = K8S / "README.md"
SCHEMAS = ROOT / "data" / "k8s-schemas"
OVERLAYS = ("cpu", "gpu")
COMPONENT = K8S / "gcs-fault-tolerance"
KUBERNETES = "1.33"
CUSTOM = {
    ("ray.io/v1", "RayService"): "ray.io_rayservices.yaml",
    ("monitoring.coreos.com/v1", "PodMonitor"): "monitoring.coreos.com_podmonitors.yaml",
    ("monitoring.coreos.com/v1", "PrometheusRule"): "monitoring.coreos.com_prometheusrules.yaml",
}

Document = dict[str, Any]


# --- schemas ------------------------------------------------------------------------------------


def strict(schema: Any) -> Any:
    """A schema that refuses what an API server would prune in silence: unknown fields."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and not is_open:
        result["additionalProperties"] = False
    return result


@cache
def custom_schema(api_version: str, kind: str) -> Any:
    text = (SCHEMAS / CUSTOM[api_version, kind]).read_text()
    crd = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    version = api_version.partition("/")[2]
    found = next(v for v in crd["spec"]["versions"] if v["name"] == version)
    schema = strict(found["schema"]["openAPIV3Schema"])
    # As the API server, which knows the metadata of every kind by itself.
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


def validate(document: Document) -> None:
    kind = document["apiVersion"], document["kind"]
    if kind in CUSTOM:
        jsonschema.Draft202012Validator(custom_schema(*kind)).validate(document)
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def documents(file: Path) -> list[Document]:
    return [d for d in yaml.safe_load_all(file.read_text()) if d is not None]


def kustomization(folder: Path) -> Document:
    (document,) = documents(folder / "kustomization.yaml")
    return document


FOLDERS = sorted(
    file.parent
    for file in K8S.glob("*/kustomization.yaml")
    if kustomization(file.parent)["kind"] == "Kustomization"
)


def resource_files(folder: Path) -> Iterator[Path]:
    """Files that a kustomization names, those of other folders too."""
    for name in kustomization(folder).get("resources", ()):
        path = (folder / name).resolve()
        if path.is_dir():
            yield from resource_files(path)
        else:
            yield path


MANIFESTS = sorted({file for folder in FOLDERS for file in resource_files(folder)})


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda f: str(f.relative_to(K8S)))
def test_manifests_fit_their_schemas(file: Path) -> None:
    assert documents(file)
    for document in documents(file):
        validate(document)


def test_every_file_is_used() -> None:
    used = {folder / name for folder in FOLDERS for name in kustomization_files(folder)}
    used |= {folder / "kustomization.yaml" for folder in (*FOLDERS, COMPONENT)} | set(MANIFESTS)
    assert set(K8S.rglob("*.yaml")) == used


def kustomization_files(folder: Path) -> Iterator[str]:
    content = kustomization(folder)
    yield from content.get("configurations", ())
    for generator in content.get("configMapGenerator", ()):
        yield from generator["files"]


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("spec.rayClusterConfig.rayversion", "2.60.0", "rayversion"),
        ("spec.rayClusterConfig.headGroupSpec.template.spec.volume", [], "volume"),
        ("spec.rayClusterDeletionDelaySeconds", "330", "330"),
        ("spec.rayClusterConfig.authOptions.mode", "tokens", "tokens"),
    ],
)
def test_unknown_fields_and_wrong_values_are_refused(path: str, value: Any, text: str) -> None:
    document = ray_service("gpu")
    *sections, key = path.split(".")
    target = document
    for section in sections:
        target = target[section]
    target[key] = value
    with pytest.raises(jsonschema.ValidationError, match=text):
        validate(document)


def test_unknown_fields_of_built_in_kinds_are_refused() -> None:
    (claim,) = documents(K8S / "prepare" / "models.yaml")
    claim["spec"]["storageclass"] = "fast"
    with pytest.raises(kubernetes_validate.ValidationError, match="storageclass"):
        validate(claim)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_component_fits_the_ray_services(overlay: str) -> None:
    (patch,) = kustomization(COMPONENT)["patches"]
    document = ray_service(overlay)
    assert patch["target"] == {"kind": document["kind"], "name": document["metadata"]["name"]}
    for operation in yaml.safe_load(patch["patch"]):
        assert operation["op"] == "add"
        *sections, key = operation["path"].strip("/").split("/")
        target = document
        for section in sections:
            target = target[section]
        target[key] = operation["value"]
    validate(document)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_kustomize_builds_what_the_api_server_takes(folder: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl here")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    for document in built:
        validate(document)
        if document["kind"] != "Namespace":
            assert document["metadata"]["namespace"] == "eldr", document["metadata"]["name"]
    config_maps = {d["metadata"]["name"] for d in built if d["kind"] == "ConfigMap"}
    named = set(re.findall(r"configMap:\s+name: (\S+)", done.stdout))
    assert named == config_maps
    (tag,) = [i["newTag"] for i in kustomization(folder).get("images", ())] or [None]
    assert {f":{tag}" for _ in re.findall("image: ", done.stdout)} == {
        image[image.rindex(":") :] for image in re.findall(r"image: (\S+)", done.stdout)
    }


def test_recipe_of_the_readme_makes_a_prometheus_rule() -> None:
    rules = ROOT / "dashboards" / "alerts.yaml"
    (recipe,) = re.findall(r"^(\{ printf .*?\}) \| kubectl", README.read_text(), re.M | re.S)
    done = subprocess.run(["sh", "-c", recipe], cwd=ROOT, capture_output=True, text=True)
    document = yaml.safe_load(done.stdout)
    validate(document)
    assert document["spec"] == yaml.safe_load(rules.read_text())
    (monitor,) = documents(K8S / "monitoring" / "pod-monitor.yaml")
    assert document["metadata"]["labels"] == monitor["metadata"]["labels"]


# --- what a RayService says ---------------------------------------------------------------------


def ray_service(overlay: str) -> Document:
    (document,) = documents(K8S / overlay / "rayservice.yaml")
    return document


def groups(overlay: str) -> dict[str, Document]:
    """Head and worker groups by name."""
    cluster = ray_service(overlay)["spec"]["rayClusterConfig"]
    workers = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {"head": cluster["headGroupSpec"], **workers}


def container(group: Document) -> Document:
    (only,) = group["template"]["spec"]["containers"]
    result: Document = only
    return result


def environment(group: Document) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container(group)["env"]}


def serve_config(overlay: str) -> Document:
    result: Document = yaml.safe_load(ray_service(overlay)["spec"]["serveConfigV2"])
    return result


def selected(selector: Document, overlay: str) -> dict[str, Document]:
    """Groups whose pods a label selector matches."""

    def matches(labels: Document) -> bool:
        return all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items()) and all(
            e["operator"] == "In" and labels.get(e["key"]) in e["values"]
            for e in selector.get("matchExpressions", ())
        )

    found = groups(overlay).items()
    return {name: g for name, g in found if matches(g["template"]["metadata"]["labels"])}


@cache
def settings(overlay: str) -> EldrConfig:
    """The schema's view of an overlay's eldr.yaml, without looking for its files."""
    return EldrConfig.model_validate(yaml.safe_load((K8S / overlay / "eldr.yaml").read_text()))


def pools(overlay: str) -> dict[str, Any]:
    return {"prefill": settings(overlay).prefill, "decode": settings(overlay).decode}


overlays = pytest.mark.parametrize("overlay", OVERLAYS)


# --- configurations -----------------------------------------------------------------------------


def moved(file: Path, paths: dict[str, Path], folder: Path) -> Path:
    """A copy of a configuration that finds the image's or the volume's folders elsewhere."""
    text = file.read_text()
    for path, actual in paths.items():
        text = text.replace(path, str(actual))
    copy = folder / "eldr.yaml"
    copy.write_text(text)
    return copy


def test_demo_configuration_is_accepted(tmp_path: Path, capsys: Any) -> None:
    file = moved(K8S / "cpu" / "eldr.yaml", {"/opt/eldr": ROOT}, tmp_path)
    assert main(["config", "check", str(file)]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("overlay", ["gpu", "prepare"])
def test_gpu_configurations_are_accepted(overlay: str, tmp_path: Path, capsys: Any) -> None:
    model = tmp_path / "Qwen3-30B-A3B"
    model.mkdir()
    shape = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40960,
    }
    (model / "config.json").write_text(json.dumps(shape))
    (model / "model.safetensors").write_bytes(b"")
    facts = model_facts(model)
    artifact = tmp_path / "Qwen3-30B-A3B-calibration"
    artifact.mkdir()
    fitted = {
        "format_version": 1,
        "model_id": "Qwen/Qwen3-30B-A3B",
        "fingerprint": facts.fingerprint,
        "num_layers": facts.num_moe_layers,
        "num_experts": facts.num_experts,
        "top_k": facts.top_k,
        "k": int(option(prepare_command(), "--k")),
        "num_requests": 1000,
    }
    (artifact / "calibration.json").write_text(json.dumps(fitted))
    file = moved(K8S / overlay / "eldr.yaml", {"/models": tmp_path}, tmp_path)
    assert main(["config", "check", str(file)]) == 0, capsys.readouterr().err
    assert load_config(file).model.path == str(model)


def prepare_command() -> list[str]:
    """Words of the two commands that make the artifact."""
    (job,) = documents(K8S / "prepare" / "job.yaml")
    (calibrate,) = job["spec"]["template"]["spec"]["containers"]
    return shlex.split(calibrate["command"][-1])


def option(words: list[str], name: str, number: int = 0) -> str:
    places = [i for i, word in enumerate(words) if word == name]
    return words[places[number] + 1]


def test_preparation_leaves_what_the_gpu_configuration_reads() -> None:
    (job,) = documents(K8S / "prepare" / "job.yaml")
    (download,) = job["spec"]["template"]["spec"]["initContainers"]
    words, gpu = prepare_command(), settings("gpu")
    assert option(download["command"], "--local-dir") == gpu.model.path
    assert settings("prepare").model.path == gpu.model.path
    assert words[:3] == ["eldr", "calibrate", "capture"]
    assert option(words, "--out") in words[words.index("fit") :]  # fit reads what capture wrote
    assert option(words, "--out", 1) == gpu.router.artifact
    assert option(words, "--k") == str(gpu.decode.num_replicas)
    prompts = option(words, "--prompts").replace("/opt/eldr", str(ROOT))
    assert list(Path(prompts).glob("*.jsonl"))


# --- one value in two places --------------------------------------------------------------------


@overlays
def test_serve_config_is_ours(overlay: str) -> None:
    schema = ServeDeploySchema.model_validate(serve_config(overlay))
    (application,) = schema.applications
    assert application.name == settings(overlay).app_name
    assert application.route_prefix == "/"
    module, _, name = application.import_path.partition(":")
    assert callable(getattr(import_module(module), name))
    for group in groups(overlay).values():  # Serve may build the application on any of them
        mounts = {m["mountPath"]: m["name"] for m in container(group)["volumeMounts"]}
        volumes = {v["name"]: v for v in group["template"]["spec"]["volumes"]}
        (generator,) = kustomization(K8S / overlay)["configMapGenerator"]
        folder, _, file = application.args["config"].rpartition("/")
        assert volumes[mounts[folder]]["configMap"]["name"] == generator["name"]
        assert file in generator["files"]


@overlays
def test_address_and_proxy_agree(overlay: str) -> None:
    http, options = settings(overlay).http, serve_config(overlay)["http_options"]
    assert (options["host"], options["port"]) == (http.host, http.port)
    for group in groups(overlay).values():
        ports = {p["name"]: p["containerPort"] for p in container(group)["ports"]}
        assert ports["serve"] == http.port
        assert environment(group)["RAY_SERVE_ENABLE_HA_PROXY"] == str(int(http.haproxy))


@overlays
def test_keys_come_from_a_secret_that_the_readme_makes(overlay: str) -> None:
    name = settings(overlay).limits.api_keys_env
    for group in groups(overlay).values():  # an ingress may run on any of them
        reference = environment(group)[name]["secretKeyRef"]
        made = f"create secret generic {reference['name']} --from-literal={reference['key']}="
        assert made in README.read_text()
    assert all(d["kind"] != "Secret" for file in MANIFESTS for d in documents(file))


@overlays
def test_pods_of_a_pool_are_for_one_engine_each(overlay: str) -> None:
    for name, pool in pools(overlay).items():
        group = groups(overlay)[name]
        assert pool.node_labels.items() <= group["labels"].items()
        assert group["replicas"] == group["minReplicas"] == pool.num_replicas
        assert group["maxReplicas"] > pool.num_replicas  # a drained pod's engine needs a place
        limits = container(group)["resources"]["limits"]
        assert pool.num_cpus <= float(limits["cpu"])
        if settings(overlay).device == "gpu":
            assert limits["nvidia.com/gpu"] == (pool.num_gpus or pool.tensor_parallel_size)
        else:
            assert float(limits["cpu"]) < 2 * pool.num_cpus
        assert float(limits["cpu"]) - pool.num_cpus >= 0.1  # the ingress's


@overlays
def test_streams_have_time_to_end(overlay: str) -> None:
    longest = settings(overlay).limits.request_timeout_s
    for name, pool in pools(overlay).items():
        group = groups(overlay)[name]
        (program, command, flag, drain_s) = container(group)["lifecycle"]["preStop"]["exec"][
            "command"
        ]
        assert (program, command, flag) == ("eldr", "drain", "--timeout")
        assert longest < pool.graceful_shutdown_timeout_s < int(drain_s)
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert int(drain_s) < grace_s
        assert int(environment(group)["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > longest
    assert ray_service(overlay)["spec"]["rayClusterDeletionDelaySeconds"] > longest


@overlays
def test_mounts_have_room(overlay: str) -> None:
    for name, group in groups(overlay).items():
        mounts = {m["name"]: m["mountPath"] for m in container(group)["volumeMounts"]}
        volumes = {v["name"]: v for v in group["template"]["spec"]["volumes"]}
        assert mounts.keys() == volumes.keys(), name
        assert mounts["shm"] == "/dev/shm"
        shm = volumes["shm"]["emptyDir"]
        assert shm["medium"] == "Memory"
        objects = int(group["rayStartParams"]["object-store-memory"])
        assert objects < gibibytes(shm["sizeLimit"]) * 2**30
        memory = gibibytes(container(group)["resources"]["limits"]["memory"])
        assert gibibytes(shm["sizeLimit"]) < memory
        if name in pools(overlay):
            assert (pools(overlay)[name].kv_cache_gib or 0) < memory


def gibibytes(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi"))


@overlays
def test_pods_keep_to_the_restricted_standard(overlay: str) -> None:
    (namespace,) = documents(K8S / "base" / "namespace.yaml")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    (job,) = documents(K8S / "prepare" / "job.yaml")
    cluster = ray_service(overlay)["spec"]["rayClusterConfig"]
    specs = [g["template"]["spec"] for g in groups(overlay).values()]
    specs.append(job["spec"]["template"]["spec"])
    contexts = [cluster["autoscalerOptions"]["securityContext"]]
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        contexts += [c["securityContext"] for c in spec["containers"]]
        contexts += [c["securityContext"] for c in spec.get("initContainers", ())]
    for context in contexts:
        assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@overlays
def test_policies_and_budgets_select_pods_that_exist(overlay: str) -> None:
    for file in ("network-policy.yaml", "disruption.yaml"):
        for document in documents(K8S / "base" / file):
            spec = document["spec"]
            found = selected(spec.get("podSelector") or spec.get("selector"), overlay)
            assert found, document["metadata"]["name"]
            if document["kind"] == "PodDisruptionBudget":
                (name,) = found
                assert document["metadata"]["name"] == f"eldr-{name}"
                assert spec["minAvailable"] <= found[name].get("replicas", 1)
    for name in ("eldr", "eldr-clients", "eldr-metrics"):
        (policy,) = [
            d
            for d in documents(K8S / "base" / "network-policy.yaml")
            if d["metadata"]["name"] == name
        ]
        assert selected(policy["spec"]["podSelector"], overlay) == groups(overlay)


@overlays
def test_named_ports_exist(overlay: str) -> None:
    (monitor,) = documents(K8S / "monitoring" / "pod-monitor.yaml")
    watched = selected(monitor["spec"]["selector"], overlay)
    assert watched == groups(overlay)
    wanted = {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]}
    admitted = set()
    for document in documents(K8S / "base" / "network-policy.yaml"):
        pods = selected(document["spec"]["podSelector"], overlay)
        known = {p["name"] for g in pods.values() for p in container(g)["ports"]}
        for rule in document["spec"].get("ingress", ()):
            named = {p["port"] for p in rule.get("ports", ()) if isinstance(p["port"], str)}
            assert named <= known, document["metadata"]["name"]
            admitted |= named
    assert wanted <= admitted
    for group in watched.values():
        ports = {p["name"]: p["containerPort"] for p in container(group)["ports"]}
        assert ports["metrics"] == int(group["rayStartParams"].get("metrics-export-port", 8080))


def test_versions_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (ray,) = [d.partition("==")[2] for d in project["dependencies"] if d.startswith("ray[")]
    file = (K8S / "image" / "Dockerfile").read_text()
    bases = re.findall(r"^FROM rayproject/ray:(\S+)-py311-\S+ AS", file, re.MULTILINE)
    assert bases == [ray, ray]
    (nixl,) = set(re.findall(r"nixl==(\S+)", file))
    extras = project["optional-dependencies"]
    assert all(f"nixl-cu12=={nixl}" in extras[variant] for variant in OVERLAYS)
    assert f'"nixl=={nixl}"' in (ROOT / "scripts" / "setup.sh").read_text()
    for overlay in OVERLAYS:
        assert ray_service(overlay)["spec"]["rayClusterConfig"]["rayVersion"] == ray
        (image,) = kustomization(K8S / overlay)["images"]
        assert image["newTag"] == f"{project['version']}-{overlay}"
        assert {container(g)["image"] for g in groups(overlay).values()} == {image["name"]}
    assert kustomization(K8S / "prepare")["images"][0]["newTag"] == f"{project['version']}-gpu"


def test_references_follow_the_hash_in_both_overlays() -> None:
    assert documents(K8S / "cpu" / "references.yaml") == documents(K8S / "gpu" / "references.yaml")
