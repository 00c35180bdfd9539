"""The example manifests and scripts: well-formed, of the public schemas' shape, and with flags that
the role scripts know."""

import argparse
import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

from deepinfer_jax.launch.common import add_role_flags
from deepinfer_jax.launch.processes import detect
from deepinfer_jax.launch.router import RouterArgs, add_dataclass_flags
from deepinfer_jax.scheduler.roles import EngineType

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "launch" / "examples"

# The parts of the public schemas that the examples use; nothing else is allowed in them, so a
# misspelt field is found.
POD = {
    "type": "object",
    "additionalProperties": False,
    "required": ["containers"],
    "properties": {
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never"]},
        "terminationGracePeriodSeconds": {"type": "integer", "minimum": 0},
        "containers": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "image"],
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
                    "image": {"type": "string"},
                    "command": {"type": "array", "items": {"type": "string"}},
                    "args": {"type": "array", "items": {"type": "string"}},
                    "ports": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["containerPort"],
                            "properties": {
                                "containerPort": {"type": "integer", "minimum": 1, "maximum": 65535}
                            },
                        },
                    },
                    "env": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["name"],
                            "properties": {
                                "name": {"type": "string"},
                                "value": {"type": "string"},
                                "valueFrom": {
                                    "type": "object",
                                    "additionalProperties": False,
                                    "properties": {
                                        "fieldRef": {"type": "object", "required": ["fieldPath"]}
                                    },
                                },
                            },
                        },
                    },
                    "readinessProbe": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "httpGet": {"type": "object", "required": ["path", "port"]},
                            "periodSeconds": {"type": "integer", "minimum": 1},
                        },
                    },
                    "resources": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "limits": {"type": "object"},
                            "requests": {"type": "object"},
                        },
                    },
                    "volumeMounts": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["name", "mountPath"],
                            "properties": {
                                "name": {"type": "string"},
                                "mountPath": {"type": "string"},
                                "readOnly": {"type": "boolean"},
                            },
                        },
                    },
                },
            },
        },
        "volumes": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name"],
                "properties": {
                    "name": {"type": "string"},
                    "secret": {"type": "object", "required": ["secretName"]},
                    "persistentVolumeClaim": {"type": "object", "required": ["claimName"]},
                },
            },
        },
    },
}
POD_TEMPLATE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["spec"],
    "properties": {"metadata": {"type": "object"}, "spec": POD},
}
JOB = {
    "type": "object",
    "additionalProperties": False,
    "required": ["template"],
    "properties": {
        "completions": {"type": "integer", "minimum": 1},
        "parallelism": {"type": "integer", "minimum": 1},
        "completionMode": {"enum": ["Indexed", "NonIndexed"]},
        "backoffLimit": {"type": "integer", "minimum": 0},
        "template": POD_TEMPLATE,
    },
}


def resource(version, kind, spec):
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"const": version},
            "kind": {"const": kind},
            "metadata": {"type": "object", "required": ["name"]},
            "spec": spec,
        },
    }


SCHEMAS = {
    "JobSet": resource(
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
        {
            "type": "object",
            "additionalProperties": False,
            "required": ["replicatedJobs"],
            "properties": {
                "network": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "enableDNSHostnames": {"type": "boolean"},
                        "subdomain": {"type": "string"},
                    },
                },
                "failurePolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"maxRestarts": {"type": "integer", "minimum": 0}},
                },
                "replicatedJobs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["name", "template"],
                        "properties": {
                            "name": {"type": "string"},
                            "replicas": {"type": "integer", "minimum": 0},
                            "template": {
                                "type": "object",
                                "required": ["spec"],
                                "properties": {"spec": JOB},
                            },
                        },
                    },
                },
            },
        },
    ),
    "LeaderWorkerSet": resource(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate"],
                    "properties": {
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {"enum": ["Default", "RecreateGroupOnPodRestart", "None"]},
                        "leaderTemplate": POD_TEMPLATE,
                        "workerTemplate": POD_TEMPLATE,
                    },
                },
            },
        },
    ),
    "Deployment": resource(
        "apps/v1",
        "Deployment",
        {
            "type": "object",
            "additionalProperties": False,
            "required": ["selector", "template"],
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "strategy": {"type": "object"},
                "selector": {"type": "object", "required": ["matchLabels"]},
                "template": POD_TEMPLATE,
            },
        },
    ),
    "Service": resource(
        "v1",
        "Service",
        {
            "type": "object",
            "additionalProperties": False,
            "required": ["ports"],
            "properties": {
                "selector": {"type": "object"},
                "publishNotReadyAddresses": {"type": "boolean"},
                "ports": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["port"],
                        "properties": {
                            "name": {"type": "string"},
                            "port": {"type": "integer"},
                            "targetPort": {},
                        },
                    },
                },
            },
        },
    ),
}
MANIFESTS = sorted(EXAMPLES.glob("*.yaml"))


def documents(path):
    return list(yaml.safe_load_all(path.read_text()))


def containers(node):
    """Every container anywhere in a manifest."""
    if isinstance(node, dict):
        yield from node.get("containers", ())
        for value in node.values():
            yield from containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from containers(value)


def parse(role, args):
    """Raises SystemExit for flags the role's script would refuse."""
    parser = argparse.ArgumentParser()
    if role == "router":
        add_dataclass_flags(parser, RouterArgs, "router")
    else:
        add_role_flags(parser, EngineType[role.upper()])
    return parser.parse_args(args)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.stem)
def test_manifests_match_the_schemas(path):
    for document in documents(path):
        jsonschema.Draft202012Validator(SCHEMAS[document["kind"]]).validate(document)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.stem)
def test_manifests_use_flags_and_volumes_that_exist(path):
    found = [c for d in documents(path) for c in containers(d)]
    assert {c["command"][2].rpartition(".")[2] for c in found} == {"router", "prompt", "completion"}
    for c in found:
        args = parse(c["command"][2].rpartition(".")[2], c["args"])
        assert args.secret_file == "/secret/secret"  # they listen on more than loopback
    for d in documents(path):
        for spec in pods(d):
            mounted = {m["name"] for c in spec["containers"] for m in c.get("volumeMounts", ())}
            assert mounted == {v["name"] for v in spec.get("volumes", ())}


def pods(node):
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from pods(value)
    elif isinstance(node, list):
        for value in node:
            yield from pods(value)


def test_jobset_processes_agree_with_what_a_pod_detects():
    (jobset,) = documents(EXAMPLES / "jobset.yaml")
    for job in jobset["spec"]["replicatedJobs"][1:]:
        spec = job["template"]["spec"]
        (container,) = containers(spec)
        env = {e["name"]: e.get("value", "") for e in container["env"]}
        args = parse(job["name"], container["args"])
        found = detect(
            argparse.Namespace(coordinator=None, num_processes=None, process_id=None),
            {**env, "JOB_COMPLETION_INDEX": "1"},
        )
        assert (
            found["num_processes"] == spec["completions"] == spec["parallelism"]
            and found["process_id"] == 1
        )
        host = f"{jobset['metadata']['name']}-{job['name']}-0-0"
        subdomain = jobset["spec"]["network"]["subdomain"]
        assert found["coordinator_address"].startswith(f"{host}.{subdomain}:")
        assert (
            args.data_parallel_size
            == spec["completions"] * container["resources"]["limits"]["nvidia.com/gpu"]
        )


@pytest.mark.parametrize("script", ["launch/examples/slurm.sbatch", "examples/pd_two_jobs.sh"])
def test_scripts_parse(script):
    subprocess.run([shutil.which("bash"), "-n", ROOT / script], check=True)


@pytest.mark.parametrize("script", ["launch/examples/slurm.sbatch", "examples/pd_two_jobs.sh"])
def test_scripts_use_flags_that_exist(script):
    text = (ROOT / script).read_text().replace("\\\n", " ")
    known = " ".join(p.format_help() for p in map(_parser, ("router", "prompt", "completion")))
    commands = re.findall(
        r"(?:deepinfer_jax\.launch\.\w+|^launch \w+|^  \"\$\{COMMON|^COMMON=|^SIZES=).*",
        text,
        re.MULTILINE,
    )
    flags = {f for c in commands for f in re.findall(r"--[a-z-]+", c)}
    assert flags and all(f in known for f in flags), {f for f in flags if f not in known}


def _parser(role):
    parser = argparse.ArgumentParser()
    if role == "router":
        add_dataclass_flags(parser, RouterArgs, "router")
    else:
        add_role_flags(parser, EngineType[role.upper()])
    return parser
