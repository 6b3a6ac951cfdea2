# The values of every chart. Nothing here needs a provider, so that a test can evaluate them with Terraform alone.

locals {
  charts    = "${path.module}/../../../helm"
  gpu_nodes = yamldecode(file("${local.charts}/gpu-nodes/values.yaml"))

  # The Helm provider compares versions and values of a local chart, but not its files: their hash makes a change visible.
  chart_hashes = {
    for chart in ["gpu-nodes", "mpi-operator", "queues", "storage"] : chart => sha256(join("\n", [
      for file in sort(fileset("${local.charts}/${chart}", "**")) : "${file} ${filesha256("${local.charts}/${chart}/${file}")}"
    ]))
  }

  gpu_toleration = [{ key = "nvidia.com/gpu", operator = "Exists", effect = "NoSchedule" }]

  values = {
    karpenter = {
      settings = merge(
        { clusterName = var.cluster_id, interruptionQueue = var.karpenter_queue },
        {
          featureGates = merge(
            { nodeRepair = var.node_repair },
            length(var.capacity_reservations) == 0 ? {} : { reservedCapacity = true }
          )
        }
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
        cluster_id          = var.cluster_id
        role_name           = var.node_role_name
        capacity_type       = var.karpenter_capacity_type
        consolidate_after   = var.karpenter_consolidate_after
        efa_az              = var.efa_az
        subnet_tags         = var.node_subnet_tags
        security_group_tags = var.node_security_group_tags
        expire_after        = var.node_expire_after
        max_pods            = var.node_max_pods
        root_volume = {
          gib            = var.node_volume_size
          iops           = var.node_volume_iops
          throughput_mib = var.node_volume_throughput
        }
        instance_store_policy = var.node_instance_store
        global                = { chart_sha256 = local.chart_hashes["gpu-nodes"] }
        tags                  = var.node_tags
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
          placement_group       = var.placement_group
        }
      },
      var.gpu_ami_alias == "" ? {} : { ami_alias = var.gpu_ami_alias }
    )

    nvidia_device_plugin = {
      nodeSelector = { "nvidia.com/gpu.present" = "true" }
      tolerations  = local.gpu_toleration
    }

    dcgm_exporter = {
      nodeSelector   = { "nvidia.com/gpu.present" = "true" }
      tolerations    = local.gpu_toleration
      serviceMonitor = { enabled = var.prometheus_operator }
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
      node_selector   = var.system_node_selector
      global          = { chart_sha256 = local.chart_hashes["mpi-operator"] }
    }

    # All or nothing: a run whose workers are not all ready in time gives its nodes back and returns to its queue.
    kueue = {
      managerConfig = {
        controllerManagerConfigYaml = yamlencode({
          apiVersion     = "config.kueue.x-k8s.io/v1beta2"
          kind           = "Configuration"
          health         = { healthProbeBindAddress = ":8081" }
          metrics        = { bindAddress = ":8443" }
          webhook        = { port = 9443 }
          leaderElection = { leaderElect = true, resourceName = "c1f6bfd2.kueue.x-k8s.io" }
          integrations   = { frameworks = ["batch/job", "kubeflow.org/mpijob"] }
          # After all were ready, runs themselves wait for a lost worker, or train on without it.
          waitForPodsReady = {
            timeout           = var.kueue_ready_timeout
            recoveryTimeout   = "0s"
            requeuingStrategy = { timestamp = "Eviction", backoffLimitCount = 10, backoffBaseSeconds = 60 }
          }
        })
      }
    }

    queues = {
      global        = { chart_sha256 = local.chart_hashes["queues"] }
      queue         = var.kueue_queue
      cluster_queue = var.kueue_cluster_queue
      pools = merge(
        { gpu = { gpu_limit = var.gpu_limit, instance_types = local.general_instances } },
        var.efa_az == "" ? {} : { gpu-efa = { gpu_limit = var.gpu_limit, instance_types = local.efa_instances } }
      )
    }

    storage = {
      global = { chart_sha256 = local.chart_hashes["storage"] }
      gp3    = { enabled = var.gp3_enabled }
      efs    = { enabled = var.efs_id != "", file_system_id = var.efs_id, access_point_id = var.efs_access_point_id }
      fsx = {
        enabled        = var.fsx_id != ""
        file_system_id = var.fsx_id
        dns_name       = var.fsx_dns
        mount_name     = var.fsx_mount_name
        prepare        = { enabled = var.fsx_id != "", node_selector = var.system_node_selector }
      }
    }
  }

  general_instances = length(var.gpu_instances) == 0 ? local.gpu_nodes.general.instance_types : var.gpu_instances
  efa_instances     = length(var.efa_instances) == 0 ? local.gpu_nodes.efa.instance_types : var.efa_instances
}
