"""Why jobs on Kubernetes wait or fail: the pattern of each cause in the API, what it means, what to do next.

Causes that show in the logs of the ranks are in launch/causes.py. Each pattern is matched against lines of the form
`object reason: message`; in each group a specific reason comes before a vague one.
"""

from __future__ import annotations

from maskfleet.launch.causes import cause

REFUSED = (
    cause(
        "pod security",
        r"violates PodSecurity",
        "The namespace's Pod Security level refuses the pods.",
        "use the chart's own security settings and the image of deploy/docker/train; its labels show the level",
    ),
    cause(
        "quota",
        r"exceeded quota|forbidden: .*quota",
        "The namespace's quota is too small for the pods.",
        "wait for other jobs, take fewer nodes, or ask for more: `kubectl describe resourcequota`",
    ),
    cause(
        "limits",
        r"(?:maximum|minimum) \S+ usage per (?:Pod|Container)|LimitRange",
        "A LimitRange of the namespace refuses what the pods ask for.",
        "lower launch.cpus and launch.memory_gib, or change the LimitRange",
    ),
    cause(
        "admission",
        r"admission webhook .* denied|(?:pods|jobs)\S* .*is forbidden|created failed:",
        "The cluster refuses to create the pods.",
        "the message below names who refused and why; change the value, or ask the cluster's administrator",
    ),
    cause(
        "invalid job",
        r"ValidationError|Found validation errors",
        "The MPI operator refuses the job as invalid.",
        "the message below names the field; chart and operator may be incompatible (mpi-operator 0.6 or newer)",
    ),
    cause(
        "name taken",
        r"ErrResourceExists|already exists and is not managed by MPIJob",
        "Something else in the namespace has a name that the job needs.",
        "choose another --name",
    ),
)

VOLUME = (
    cause(
        "volume unbound",
        r"unbound immediate PersistentVolumeClaims|persistentvolumeclaim \S+ not found|ClaimLost",
        "A volume claim is missing or not bound to a volume.",
        "see `kubectl get pvc`; deploy/helm/storage makes pv-efs and pv-fsx (docs/run-anywhere/eks/addons.md)",
    ),
    cause(
        "volume mount",
        r"FailedMount|FailedAttachVolume|MountVolume\.\w+ failed|Unable to attach or mount",
        "A volume cannot be mounted.",
        "check that its CSI driver runs and nodes can reach the file system (ports: EFS 2049; FSx 988, 1018-1023)",
    ),
    cause(
        "volume zone",
        r"volume node affinity conflict",
        "The volume is in another zone than the nodes that fit.",
        "use nodes of the file system's zone, or a file system available in all zones, such as EFS",
    ),
)

CAPACITY = (
    cause(
        "no capacity",
        r"InsufficientCapacityError|InsufficientInstanceCapacity|UnfulfillableCapacity|insufficient capacity",
        "AWS has no capacity for this instance type in these zones now.",
        "wait, allow more zones or another --instance, or reserve capacity",
    ),
    cause(
        "account limit",
        r"VcpuLimitExceeded|MaxSpotInstanceCountExceeded|InstanceLimitExceeded",
        "The AWS account's limit for instances of this type is reached.",
        "ask AWS to raise the quota in Service Quotas",
    ),
    cause(
        "pool limit",
        r"exceed(?:ed)? limits? for nodepool|exceeding limits",
        "The Karpenter node pool has reached its own limit.",
        "raise the pool's limit (deploy/helm/gpu-nodes), or wait",
    ),
    cause(
        "no node pool",
        r"Failed to schedule pod, (?:incompatible|no instance type|did not tolerate|no nodepool)",
        "No node pool provisions nodes that fit these pods.",
        "check --instance against the pools of deploy/helm/gpu-nodes; types with EFA are in one zone only",
    ),
    cause(
        "waits for a node",
        r"should schedule on|Nominated|TriggeredScaleUp|pod triggered scale-up",
        "A node is being provisioned; that takes a few minutes.",
        "wait; `kubectl get nodeclaims` shows the node",
    ),
)

NO_NODE = (
    cause(
        "no gpu node",
        r"Insufficient nvidia\.com/gpu",
        "No node has enough free GPUs.",
        "wait for Karpenter or another job; check --instance, and that the NVIDIA device plugin runs on GPU nodes",
    ),
    cause(
        "no efa node",
        r"Insufficient vpc\.amazonaws\.com/efa",
        "No node has enough free EFA devices.",
        "check that the EFA device plugin runs and the instance type has EFA, or set launch.efa=false",
    ),
    cause(
        "no node",
        r"FailedScheduling|Unschedulable|nodes are available",
        "No node fits the pods.",
        "the message below says what each node lacks: CPU, memory, a label or a zone",
    ),
)

NODE = (
    cause(
        "spot reclaimed",
        r"SpotInterrupted|[Ss]pot [Ii]nterruption|SpotRebalanceRecommendation",
        "AWS took the Spot machine back.",
        "nothing is lost but the steps since the last checkpoint; the job starts again while retries are left",
    ),
    cause(
        "node lost",
        r"NodeLost|NodeNotReady|DeletionByTaintManager|TaintManagerEviction|node is shutting down|NodeShutdown",
        "A node was removed or stopped responding.",
        "see `kubectl get nodes`; the job starts again from its last checkpoint while retries are left",
    ),
    cause(
        "worker silent",
        r"[Ll]iveness probe failed|failed liveness probe|wait-for-workers ended",
        "A worker did not respond, and the launcher gave up the attempt.",
        "see that worker in `maskfleet status`: its node may be lost or out of memory; the next attempt waits for it",
    ),
    cause(
        "evicted",
        r"\bEvicted\b|EvictionByEvictionAPI|[Ee]victed",
        "A pod was evicted from its node, most often because memory or disk ran short there.",
        "cancel and launch the same name again, which resumes from its last checkpoint; the operator replaces a worker "
        "that failed only after its pod is deleted",
    ),
    cause(
        "preempted",
        r"PreemptionByScheduler|Preempted",
        "A pod was preempted by one of higher priority.",
        "wait, or give the job a priority class",
    ),
)

CONTAINER = (
    cause(
        "image",
        r"ErrImagePull|ImagePullBackOff|InvalidImageName|ErrImageNeverPull|Failed to pull image",
        "The training image cannot be pulled.",
        "check launch.image, that it was pushed to this region's ECR, and that the node role may read the repository",
    ),
    cause(
        "container config",
        r"CreateContainerConfigError|(?:secret|configmap) \"[^\"]+\" not found",
        "Something that the container needs is missing: a Secret, a ConfigMap or a key in one.",
        "the message below names it; `helm get manifest RELEASE` shows what was installed",
    ),
    cause(
        "container start",
        r"CreateContainerError|RunContainerError|ContainerCannotRun|StartError|exec format error",
        "The container cannot be started.",
        "use the image of deploy/docker/train, built for the nodes' architecture (amd64)",
    ),
)

ENDED = (
    cause(
        "deadline",
        r"DeadlineExceeded",
        "The job exceeded its deadline.",
        "raise max_run_s of the chart; launching the same name again resumes from the last checkpoint",
    ),
)
