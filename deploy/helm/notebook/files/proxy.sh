#!/bin/sh
# Starts the proxy. $1: folder with nginx.conf's parts, certificate and login; $2: folder to write in; $3: seconds
# between looks at the certificate and the login, which others renew.
set -eu
config=$1
run=$2
period=${3:-60}
umask 077

if ! [ -s "$config/login/htpasswd" ]; then
    echo "proxy: $config/login/htpasswd is missing or empty: the Secret needs the key htpasswd" >&2
    exit 2
fi
# shellcheck disable=SC2016 # the dollars are those of the hash
if grep -Evq '^[^:[:space:]]+:\$2[aby]\$1[0-5]\$[./A-Za-z0-9]{53}$' "$config/login/htpasswd"; then
    echo "proxy: htpasswd holds something other than USER:BCRYPT-HASH of cost 10 to 15: make it with htpasswd -nB -C 12 USER" >&2
    exit 2
fi

new_session() {
    key=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')
    # shellcheck disable=SC2016 # the dollar is nginx's
    printf 'map "" $session_key { default "%s"; }\n' "$key" >"$run/session.conf"
}

# This shell becomes nginx below, so $$ is nginx.
renew() {
    while sleep "$period" && kill -0 "$$" 2>/dev/null; do
        certificate_now=$(cksum <"$config/tls/tls.crt")
        login_now=$(cksum <"$config/login/htpasswd")
        if [ "$login" != "$login_now" ]; then
            new_session
        fi
        if [ "$certificate$login" != "$certificate_now$login_now" ]; then
            kill -HUP "$$"
        fi
        certificate=$certificate_now
        login=$login_now
    done
}

# Before nginx reads them: what is renewed while it starts is noticed.
certificate=$(cksum <"$config/tls/tls.crt")
login=$(cksum <"$config/login/htpasswd")
new_session
renew &
exec nginx -e stderr -p "$run" -c "$config/proxy/nginx.conf"
