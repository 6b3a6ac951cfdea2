# The values of every chart. Nothing here needs a provider, so that a test can evaluate them with Terraform alone.

locals {
  charts    = "${path.module}/../../../helm"
  gpu_nodes = yamldecode(file("${local.charts}/gpu-nodes/values.yaml"))

  gpu_toleration = [{ key = "nvidia.com/gpu", operator = "Exists", effect = "NoSchedule" }]

  values = {
    karpenter = {
      settings = merge(
        { clusterName = var.cluster_id, interruptionQueue = var.karpenter_queue },
        length(var.capacity_reservations) == 0 ? {} : { featureGates = { reservedCapacity = true } }
      )
      serviceAccount = {
        name        = "karpenter"
        annotations = { "eks.amazonaws.com/role-arn" = var.karpenter_role_arn }
      }
      controller = {
        resources = {
          requests = { cpu = "1", memory = "1Gi" }
          limits   = { cpu = "1", memory = "1Gi" }
        }
      }
    }

    gpu_nodes = merge(
      {
        cluster_id        = var.cluster_id
        role_name         = var.node_role_name
        capacity_type     = var.karpenter_capacity_type
        consolidate_after = var.karpenter_consolidate_after
        efa_az            = var.efa_az
        root_volume       = { gib = var.node_volume_size }
        tags              = var.node_tags
        # Only the drivers that ../aws installed remove their startup taint.
        startup_taints = { efs = var.efs_id != "", fsx = var.fsx_id != "" }
        general = merge(
          { gpu_limit = var.gpu_limit },
          length(var.gpu_instances) == 0 ? {} : { instance_types = var.gpu_instances }
        )
        efa = {
          gpu_limit             = var.gpu_limit
          instance_types        = local.efa_instances
          capacity_reservations = [for id in var.capacity_reservations : { id = id }]
          reserved_only         = var.reserved_only
        }
      },
      var.gpu_ami_alias == "" ? {} : { ami_alias = var.gpu_ami_alias }
    )

    nvidia_device_plugin = {
      nodeSelector = { "nvidia.com/gpu.present" = "true" }
      tolerations  = local.gpu_toleration
    }

    efa_device_plugin = {
      supportedInstanceLabels = {
        keys   = ["node.kubernetes.io/instance-type"]
        values = local.efa_instances
      }
      tolerations = local.gpu_toleration
    }

    cluster_autoscaler = {
      fullnameOverride = "cluster-autoscaler"
      awsRegion        = var.region
      autoDiscovery    = { clusterName = var.cluster_id }
      image            = { tag = "v${var.cluster_version}.0" }
      rbac = {
        serviceAccount = {
          name        = "cluster-autoscaler"
          annotations = { "eks.amazonaws.com/role-arn" = var.autoscaler_role_arn }
        }
      }
      extraArgs = {
        "balance-similar-node-groups"   = true
        "expander"                      = "least-waste"
        "skip-nodes-with-local-storage" = false
        "skip-nodes-with-system-pods"   = false
      }
    }

    load_balancer_controller = {
      clusterName = var.cluster_id
      region      = var.region
      vpcId       = var.cluster_vpc
      serviceAccount = {
        name        = "aws-load-balancer-controller"
        annotations = { "eks.amazonaws.com/role-arn" = var.load_balancer_role_arn }
      }
      # Otherwise it takes over every Service of type LoadBalancer in the cluster, not only ours.
      enableServiceMutatorWebhook = false
    }

    metrics_server = { replicas = 2, podDisruptionBudget = { enabled = true, minAvailable = 1 } }

    mpi_operator = {
      image = merge(
        { digest = var.mpi_operator_digest, tag = var.mpi_operator_version },
        var.mpi_operator_image == "" ? {} : { repository = var.mpi_operator_image }
      )
      watch_namespace = var.mpi_operator_all_namespaces ? "" : var.kubeflow_namespace
      node_selector   = { "maskfleet/node" = "system" }
    }

    storage = {
      efs = { enabled = var.efs_id != "", file_system_id = var.efs_id, access_point_id = var.efs_access_point_id }
      fsx = {
        enabled        = var.fsx_id != ""
        file_system_id = var.fsx_id
        dns_name       = var.fsx_dns
        mount_name     = var.fsx_mount_name
      }
    }
  }

  efa_instances = length(var.efa_instances) == 0 ? local.gpu_nodes.efa.instance_types : var.efa_instances
}
