#!/bin/bash
# Report unhealthy GPUs to CloudWatch, and have a node replaced that has one. A systemd timer runs this every minute.
set -euo pipefail

# shellcheck source=/dev/null
. "${NODE_ENV:-/etc/maskfleet/node.env}"
: "$CLUSTER" "$REGION" "$ROLE" "$GPUS" "$INSTANCE" "$HOST_FILE" "$HOST_LINE"
export AWS_DEFAULT_REGION=$REGION AWS_PAGER="" PATH=$PATH:/usr/local/bin:/snap/bin:/opt/pytorch/bin
count_file=${RUN_FOLDER:-/run}/maskfleet-unhealthy

# Errors of the GPU or its links, by NVIDIA's list of Xid errors. Others, such as 13, 31 and 43, come from programs.
hardware_xids='48|62|64|74|79|95|119|120|140'

larger() { echo $(($1 > $2 ? $1 : $2)); }

unhealthy_gpus() {
  local listed present broken failed
  listed=$(timeout 50 nvidia-smi --query-gpu=pci.bus_id,ecc.errors.uncorrected.volatile.total \
    --format=csv,noheader 2>/dev/null || true)
  present=$(grep -c '^[0-9A-Fa-f]*:' <<<"$listed" || true)
  broken=$(grep -c ', *[1-9][0-9]*$' <<<"$listed" || true)
  failed=$(journalctl -k -b -o cat --no-pager 2>/dev/null |
    { grep -oE "NVRM: Xid \(PCI:[^)]+\): ($hardware_xids)," || true; } | cut -d: -f3-5 | sort -u | wc -l)
  larger "$((GPUS - present))" "$(larger "$broken" "$failed")"
}

unhealthy=0
if ((GPUS > 0)); then unhealthy=$(unhealthy_gpus); fi
aws cloudwatch put-metric-data --namespace maskfleet --metric-name UnhealthyGpus --unit Count --value "$unhealthy" \
  --dimensions "Cluster=$CLUSTER,Role=$ROLE" || echo "maskfleet: the metric was not accepted" >&2

if ((unhealthy > 0)); then
  count=$(($(cat "$count_file" 2>/dev/null || echo 0) + 1))
  echo "$count" >"$count_file"
  echo "maskfleet: $unhealthy of $GPUS GPUs are unhealthy, seen $count times in a row" >&2
  if ((count >= 3)); then
    aws autoscaling set-instance-health --instance-id "$INSTANCE" --health-status Unhealthy
  fi
else
  rm -f "$count_file"
  # Last, because a shared folder that does not answer would stop the report of the GPUs.
  if ((GPUS > 0)); then echo "$HOST_LINE" >"$HOST_FILE"; fi
fi
