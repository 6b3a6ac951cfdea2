# Set up a node: shared file systems, SSH between nodes, health reports. The node is in service when all of it is done.
# The template puts "#!/bin/bash" and the settings before this text; scripts/cluster_template.py copies it there.
# shellcheck shell=bash disable=SC2154,SC1091
set -euo pipefail

export AWS_DEFAULT_REGION=$REGION AWS_PAGER="" DEBIAN_FRONTEND=noninteractive
export PATH=$PATH:/usr/local/bin:/snap/bin:/opt/pytorch/bin
metadata_url=http://169.254.169.254/latest

say() { echo "maskfleet: $*" >&2; }

metadata() {
  local token
  token=$(curl -fsS --retry 30 --retry-connrefused --retry-delay 2 -X PUT \
    -H "X-aws-ec2-metadata-token-ttl-seconds: 300" "$metadata_url/api/token")
  curl -fsS --retry 5 -H "X-aws-ec2-metadata-token: $token" "$metadata_url/meta-data/$1"
}

# Run a command until it succeeds, at most for the given number of seconds.
retry() {
  local seconds=$1 begin=$SECONDS
  shift
  until "$@"; do
    if ((SECONDS - begin >= seconds)); then
      say "gave up after $seconds s: $*"
      return 1
    fi
    sleep "${RETRY_S:-10}"
  done
}

# Tell CloudFormation and Auto Scaling how it ended. Only the head node reports a failure to CloudFormation, which
# then stops at once; a worker that fails is replaced by its group. Nobody waits for the signal of a later node.
finish() {
  local code=$? result=CONTINUE
  trap - EXIT
  if ((code == 0)); then
    signal SUCCESS
  else
    result=ABANDON
    say "setting up this node failed with code $code"
    if [[ $ROLE == head ]]; then signal FAILURE; fi
  fi
  report autoscaling complete-lifecycle-action --auto-scaling-group-name "$CLUSTER-$ROLE" --lifecycle-hook-name ready \
    --instance-id "$instance" --lifecycle-action-result "$result"
  exit "$code"
}

signal() {
  report cloudformation signal-resource --stack-name "$STACK" --logical-resource-id "${ROLE^}Group" \
    --unique-id "$instance" --status "$1"
}

# A node that is not heard is terminated, so a call is repeated while AWS is too busy or cannot be reached.
report() { retry 300 heard "$@" || true; }

# ValidationError: nobody waits for the report of this node.
heard() {
  local text
  if ! text=$(aws "$@" 2>&1); then
    say "$text"
    [[ $text == *"(ValidationError)"* ]]
  fi
}

install_packages() {
  apt-get -qq -o DPkg::Lock::Timeout=600 update &&
    apt-get -qq -o DPkg::Lock::Timeout=600 install -y --no-install-recommends "$@"
}

# mount_shared FOLDER SOURCE TYPE OPTIONS: mount now, and by /etc/fstab after each reboot.
mount_shared() {
  local line="$2 $1 $3 $4,_netdev 0 0"
  mkdir -p "$1"
  if ! grep -qxF "$line" /etc/fstab; then echo "$line" >>/etc/fstab; fi
  if ! mountpoint -q "$1"; then retry 900 mount "$1"; fi
}

mount_efs() {
  if command -v mount.efs >/dev/null; then
    mount_shared /efs "$EFS_ID:/" efs tls
    return
  fi
  if ! command -v mount.nfs4 >/dev/null; then retry 600 install_packages nfs-common; fi
  mount_shared /efs "$EFS_ID.efs.$REGION.$DNS_SUFFIX:/" nfs4 \
    nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport
}

install_lustre() {
  local bucket=https://fsx-lustre-client-repo key=/usr/share/keyrings/fsx-lustre.gpg
  . /etc/os-release
  echo "deb [signed-by=$key] $bucket.s3.amazonaws.com/ubuntu $VERSION_CODENAME main" \
    >/etc/apt/sources.list.d/fsx-lustre.list
  curl -fsS --retry 5 "$bucket-public-keys.s3.amazonaws.com/fsx-ubuntu-public-key.asc" |
    gpg --dearmor --yes -o "$key" && install_packages "lustre-client-modules-$(uname -r)"
}

mount_lustre() {
  if ! command -v mount.lustre >/dev/null; then retry 600 install_lustre; fi
  mount_shared /fsx "$LUSTRE" lustre relatime,flock
  chown "$LOGIN_USER:" /fsx
}

# One key pair for the nodes of the cluster, on EFS, where only the login user and root of the nodes can read it.
# Each node publishes its host key there, so that nodes recognize each other.
share_keys() {
  local home new name
  home=$(getent passwd "$LOGIN_USER" | cut -d: -f6)
  install -d -m 0755 /efs/.maskfleet
  install -d -m 0700 -o "$LOGIN_USER" -g "$LOGIN_USER" "$shared" "$shared/hosts" "$shared/known"
  if [[ ! -e $shared/key ]]; then
    new=$(mktemp -d "$shared/new.XXXXXX")
    ssh-keygen -q -t ed25519 -N "" -C "$CLUSTER" -f "$new/key"
    chown "$LOGIN_USER:" "$new/key"
    ln "$new/key" "$shared/key" 2>/dev/null || [[ -e $shared/key ]] # another node may have been first
    rm -r "$new"
  fi
  install -d -m 0700 -o "$LOGIN_USER" -g "$LOGIN_USER" "$home/.ssh"
  install -m 0600 -o "$LOGIN_USER" -g "$LOGIN_USER" "$shared/key" "$home/.ssh/maskfleet"
  if ! grep -qsF "$(ssh-keygen -y -f "$shared/key" | cut -d" " -f2)" "$home/.ssh/authorized_keys"; then
    ssh-keygen -y -f "$shared/key" >>"$home/.ssh/authorized_keys"
    chown "$LOGIN_USER:" "$home/.ssh/authorized_keys"
    chmod 0600 "$home/.ssh/authorized_keys"
  fi
  name=$(metadata local-hostname)
  sed "s/^/$address,$name,${name%%.*} /" /etc/ssh/ssh_host_*_key.pub >"$shared/known/$address"
  cat >/etc/ssh/ssh_config.d/maskfleet.conf <<END
Host ${address%%.*}.* ip-*
    IdentityFile $home/.ssh/maskfleet
    KnownHostsCommand /usr/bin/find $shared/known -type f -exec /bin/cat {} +
END
  chown -R "$LOGIN_USER:" "$shared/known"
}

gpus_ready() { [[ $(nvidia-smi -L | grep -c "^GPU ") == "$GPUS" ]]; }

start_health() {
  mkdir -p /etc/maskfleet
  printf '%s=%q\n' CLUSTER "$CLUSTER" REGION "$REGION" ROLE "$ROLE" GPUS "$GPUS" INSTANCE "$instance" \
    HOST_FILE "$shared/hosts/$address" HOST_LINE "$address slots=$GPUS" >/etc/maskfleet/node.env
  cat >/usr/local/bin/cluster-hosts <<END
#!/bin/sh
# The nodes with GPUs that reported in the last 3 minutes, as a host file: mpirun --hostfile <(cluster-hosts)
find $shared/hosts -type f -mmin -3 -exec cat {} + | sort
END
  chmod 0755 /usr/local/bin/cluster-hosts
  cat >/etc/systemd/system/maskfleet-health.service <<END
[Unit]
Description=Report the health of the GPUs
[Service]
Type=oneshot
ExecStart=/usr/local/sbin/maskfleet-health
END
  cat >/etc/systemd/system/maskfleet-health.timer <<END
[Unit]
Description=Report the health of the GPUs every minute
[Timer]
OnBootSec=60
OnUnitActiveSec=60
AccuracySec=5
[Install]
WantedBy=timers.target
END
  systemctl daemon-reload
  systemctl enable --now maskfleet-health.timer
}

instance=$(metadata instance-id)
trap finish EXIT
address=$(metadata local-ipv4)
shared=/efs/.maskfleet/$CLUSTER

mount_efs
install -d -m 0775 -o "$LOGIN_USER" -g "$LOGIN_USER" /efs/maskfleet
if [[ -n $LUSTRE ]]; then mount_lustre; fi
share_keys
if ((GPUS > 0)); then retry 300 gpus_ready; fi
start_health
say "$ROLE node $instance is ready"
