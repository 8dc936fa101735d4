"""Manifests for Kubernetes: a plain Job with a pod for each node, and Kubeflow Trainer's TrainJob.

A TrainJob is patched into the runtime `torch-distributed`, which Kubeflow Trainer installs: the operator makes the
pods and gives torchrun its options as variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and the like).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from samecurve.launch.target import CLONE, Target, Variable, command

SECONDS_TO_SAVE = 300  # between SIGTERM and the end
# torchrun gives its processes 30 seconds after SIGTERM unless set otherwise; saving a large model takes longer
TORCHRUN_SECONDS = 270
_VOLUME = os.path.dirname(CLONE)


def _header(target: Target, name: str, pods: str) -> str:
    return f"""\
# {Path(target.recipe).stem} on {target.size}: {pods}, one process per GPU.
# Edit the lines with <-, then:   kubectl apply -f {target.path(name)}
# After an interruption, delete the job and apply the file again: the run resumes from its last checkpoint.
"""


def _command(launcher: str, target: Target, indent: int) -> str:
    # Kubernetes would fill in $(NAME); YAML reads the two escapes of json for an emoji as two broken characters
    words = (word if isinstance(word, Variable) else word.replace("$(", "$$(") for word in command(launcher, target))
    return "\n".join(f"{' ' * indent}- {json.dumps(word, ensure_ascii=False)}" for word in words)


def job(target: Target) -> str:
    """Return the manifests of a headless Service and an Indexed Job."""
    return f"""\
{_header(target, "kubernetes.yaml", "a pod for each node")}\
apiVersion: v1
kind: Service
metadata:
  name: samecurve
spec:
  clusterIP: None                  # headless: it only gives the pods names, such as samecurve-0.samecurve
  publishNotReadyAddresses: true   # they look for each other while they start
  selector:
    job-name: samecurve            # a label that Kubernetes puts on the job's pods
---
apiVersion: batch/v1
kind: Job
metadata:
  name: samecurve
spec:
  completionMode: Indexed          # each pod has a number, which is its node rank, and a host name that ends with it
  completions: {target.nodes}
  parallelism: {target.nodes}
  backoffLimit: 0                  # one pod alone cannot be replaced: the others wait for the one that they began with
  template:
    spec:
      subdomain: samecurve         # the Service
      restartPolicy: Never
      terminationGracePeriodSeconds: {SECONDS_TO_SAVE}   # time to save after a pod is asked to end
      containers:
        - name: train
          image: example/samecurve:latest   # <- with requirements.txt installed, and g++ for offload
          workingDir: {CLONE}    # <- this repository, on a volume that all nodes see
          command:
{_command("kubernetes", target, 12)}
          env:
            - {{name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: "{TORCHRUN_SECONDS}"}}   # torchrun's own limit for it
          resources:
            limits:
              nvidia.com/gpu: {target.devices_per_node}
          volumeMounts:
            - {{name: storage, mountPath: {_VOLUME}}}
            - {{name: shm, mountPath: /dev/shm}}
      volumes:
        - name: storage
          persistentVolumeClaim: {{claimName: storage}}   # <- a claim that many nodes may write to (ReadWriteMany)
        - name: shm
          emptyDir: {{medium: Memory}}        # NCCL's, between the GPUs of a node; a container's default is 64 MiB
"""


def train_job(target: Target) -> str:
    """Return the manifest of a TrainJob (trainer.kubeflow.org/v1alpha1 with runtimePatches, Kubeflow Trainer 2.2)."""
    return f"""\
{_header(target, "trainjob.yaml", "Kubeflow Trainer makes a pod for each node")}\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: samecurve
spec:
  runtimeRef:
    name: torch-distributed        # it comes with Kubeflow Trainer
  trainer:
    image: example/samecurve:latest   # <- with requirements.txt installed, and g++ for offload
    numNodes: {target.nodes}
    numProcPerNode: {target.devices_per_node}
    command:                       # {CLONE} is this repository, on a volume that all nodes see   <-
{_command("trainjob", target, 6)}
    env:
      - {{name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: "{TORCHRUN_SECONDS}"}}   # torchrun gives 30 seconds to save
    resourcesPerNode:
      limits:
        nvidia.com/gpu: {target.devices_per_node}
  runtimePatches:
    - manager: samecurve           # who owns this patch
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        terminationGracePeriodSeconds: {SECONDS_TO_SAVE}   # time to save after a pod is asked to end
                        containers:
                          - name: node
                            volumeMounts:
                              - {{name: storage, mountPath: {_VOLUME}}}
                              - {{name: shm, mountPath: /dev/shm}}
                        volumes:
                          - name: storage
                            persistentVolumeClaim: {{claimName: storage}}   # <- one that many nodes may write to
                          - name: shm
                            emptyDir: {{medium: Memory}}   # NCCL's, between the GPUs of a node
"""
