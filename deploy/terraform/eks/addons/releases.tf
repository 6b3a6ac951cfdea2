# The order of deletion matters too: the pools are deleted while Karpenter can still terminate their nodes.

resource "helm_release" "karpenter_crd" {
  count = contains(var.existing_parts, "karpenter") ? 0 : 1

  name             = "karpenter-crd"
  namespace        = var.karpenter_namespace
  create_namespace = true
  repository       = "oci://public.ecr.aws/karpenter"
  chart            = "karpenter-crd"
  version          = var.karpenter_version
  max_history      = 5

  depends_on = [data.aws_eks_cluster.this]
}

resource "helm_release" "karpenter" {
  count = contains(var.existing_parts, "karpenter") ? 0 : 1

  name        = "karpenter"
  namespace   = var.karpenter_namespace
  repository  = "oci://public.ecr.aws/karpenter"
  chart       = "karpenter"
  version     = var.karpenter_version
  skip_crds   = true
  atomic      = true
  timeout     = 600
  max_history = 5
  values      = [yamlencode(local.values.karpenter)]

  lifecycle {
    precondition {
      condition     = var.karpenter_role_arn != "" && var.karpenter_queue != ""
      error_message = "karpenter_role_arn and karpenter_queue are needed to install Karpenter."
    }
  }

  depends_on = [helm_release.karpenter_crd]
}

resource "helm_release" "gpu_nodes" {
  count = contains(var.existing_parts, "node_pools") ? 0 : 1

  name        = "gpu"
  namespace   = var.karpenter_namespace
  chart       = "${local.charts}/gpu-nodes"
  max_history = 5
  # Karpenter drains and terminates the nodes of the pools before the pools are deleted.
  timeout = 1800
  values  = [yamlencode(local.values.gpu_nodes)]

  lifecycle {
    precondition {
      condition     = !var.reserved_only || length(var.capacity_reservations) > 0
      error_message = "reserved_only needs capacity_reservations."
    }
    precondition {
      condition     = var.node_role_name != ""
      error_message = "node_role_name is needed to create node pools."
    }
  }

  depends_on = [helm_release.karpenter]
}

resource "helm_release" "nvidia_device_plugin" {
  count = contains(var.existing_parts, "nvidia_device_plugin") ? 0 : 1

  name        = "nvidia-device-plugin"
  namespace   = "kube-system"
  repository  = "https://nvidia.github.io/k8s-device-plugin"
  chart       = "nvidia-device-plugin"
  version     = var.nvidia_plugin_version
  atomic      = true
  max_history = 5
  values      = [yamlencode(local.values.nvidia_device_plugin)]

  depends_on = [data.aws_eks_cluster.this]
}

resource "helm_release" "dcgm_exporter" {
  count = var.dcgm_exporter_enabled ? 1 : 0

  name        = "dcgm-exporter"
  namespace   = "kube-system"
  repository  = "https://nvidia.github.io/dcgm-exporter/helm-charts"
  chart       = "dcgm-exporter"
  version     = var.dcgm_exporter_version
  atomic      = true
  max_history = 5
  values      = [yamlencode(local.values.dcgm_exporter)]

  depends_on = [data.aws_eks_cluster.this]
}

resource "helm_release" "efa_device_plugin" {
  count = var.efa_az == "" || contains(var.existing_parts, "efa_device_plugin") ? 0 : 1

  name        = "aws-efa-k8s-device-plugin"
  namespace   = "kube-system"
  repository  = "https://aws.github.io/eks-charts"
  chart       = "aws-efa-k8s-device-plugin"
  version     = var.efa_plugin_version
  atomic      = true
  max_history = 5
  values      = [yamlencode(local.values.efa_device_plugin)]

  depends_on = [data.aws_eks_cluster.this]
}

resource "helm_release" "cluster_autoscaler" {
  count = contains(var.existing_parts, "cluster_autoscaler") ? 0 : 1

  name        = "cluster-autoscaler"
  namespace   = "kube-system"
  repository  = "https://kubernetes.github.io/autoscaler"
  chart       = "cluster-autoscaler"
  version     = var.autoscaler_version
  atomic      = true
  max_history = 5
  values      = [yamlencode(local.values.cluster_autoscaler)]

  lifecycle {
    precondition {
      condition     = var.autoscaler_role_arn != ""
      error_message = "autoscaler_role_arn is needed to install the Cluster Autoscaler."
    }
  }

  depends_on = [data.aws_eks_cluster.this]
}

resource "helm_release" "load_balancer_controller" {
  count = var.load_balancer_role_arn == "" ? 0 : 1

  name        = "aws-load-balancer-controller"
  namespace   = "kube-system"
  repository  = "https://aws.github.io/eks-charts"
  chart       = "aws-load-balancer-controller"
  version     = var.load_balancer_controller_version
  atomic      = true
  max_history = 5
  values      = [yamlencode(local.values.load_balancer_controller)]

  lifecycle {
    precondition {
      condition     = var.cluster_vpc != ""
      error_message = "cluster_vpc is needed with load_balancer_role_arn."
    }
  }

  depends_on = [data.aws_eks_cluster.this]
}

resource "helm_release" "metrics_server" {
  count = var.metrics_server_enabled ? 1 : 0

  name        = "metrics-server"
  namespace   = "kube-system"
  repository  = "https://kubernetes-sigs.github.io/metrics-server"
  chart       = "metrics-server"
  version     = var.metrics_server_version
  atomic      = true
  max_history = 5
  values      = [yamlencode(local.values.metrics_server)]

  depends_on = [data.aws_eks_cluster.this]
}

resource "helm_release" "mpi_operator" {
  count = contains(var.existing_parts, "mpi_operator") ? 0 : 1

  name        = "mpi-operator"
  namespace   = local.namespace
  chart       = "${local.charts}/mpi-operator"
  atomic      = true
  max_history = 5
  values      = [yamlencode(local.values.mpi_operator)]
}

resource "helm_release" "kueue" {
  count = var.kueue_enabled && !contains(var.existing_parts, "kueue") ? 1 : 0

  name             = "kueue"
  namespace        = "kueue-system"
  create_namespace = true
  repository       = "oci://registry.k8s.io/kueue/charts"
  chart            = "kueue"
  version          = var.kueue_version
  atomic           = true
  max_history      = 5
  values           = [yamlencode(local.values.kueue)]

  # Kueue looks for the MPIJob CRD when it starts.
  depends_on = [helm_release.mpi_operator]
}

resource "helm_release" "queues" {
  count = var.kueue_queue == "" ? 0 : 1

  name        = "queues"
  namespace   = local.namespace
  chart       = "${local.charts}/queues"
  max_history = 5
  values      = [yamlencode(local.values.queues)]

  lifecycle {
    precondition {
      condition     = var.kueue_enabled
      error_message = "kueue_queue needs kueue_enabled."
    }
  }

  # Kueue's webhook checks queues when they are created.
  depends_on = [helm_release.kueue]
}

resource "helm_release" "storage" {
  count = var.efs_id == "" && var.fsx_id == "" && !var.gp3_enabled ? 0 : 1

  name        = "storage"
  namespace   = local.namespace
  chart       = "${local.charts}/storage"
  max_history = 5
  values      = [yamlencode(local.values.storage)]
  # No run can write to FSx before its Job has created the folders.
  wait_for_jobs = true
  timeout       = 1200

  lifecycle {
    precondition {
      condition     = var.fsx_id == "" || (var.fsx_dns != "" && var.fsx_mount_name != "")
      error_message = "fsx_dns and fsx_mount_name are needed with fsx_id."
    }
  }
}
