{{- define "notebook.nginx" -}}
{{- $config := .Values.proxy.config_dir }}
{{- $run := printf "%s/proxy" .Values.proxy.run_dir }}
{{- $cookie := include "notebook.cookie" . -}}
daemon off;
worker_processes 2;
worker_shutdown_timeout 60s;
pid {{ $run }}/nginx.pid;
error_log stderr warn;

events {
    worker_connections 1024;
}

http {
    server_tokens off;
    access_log off;
    default_type application/octet-stream;
    client_body_temp_path {{ $run }}/body;
    proxy_temp_path {{ $run }}/proxied;
    fastcgi_temp_path {{ $run }}/fastcgi;
    uwsgi_temp_path {{ $run }}/uwsgi;
    scgi_temp_path {{ $run }}/scgi;

    # bcrypt is slow on purpose and a page asks for a hundred files, so who gave the password once gets a session:
    # a random key made when the proxy starts (proxy.sh sets $session_key). It is only ever handed out with an
    # answer that came from behind the proxy, and nothing gets there without a password or a session.
    include {{ $run }}/session.conf;
    map "$cookie_{{ $cookie }}:$session_key" $session_known {
        default 0;
        "~^([0-9a-f]{64}):\1$" 1;
    }
    map $session_known $session_realm {
        default "maskfleet";
        1 "off";
    }
    map "$session_known:$upstream_status" $session_cookie {
        default "";
        "~^0:[23]" "{{ $cookie }}=$session_key; Path=/; Secure; HttpOnly; SameSite=Strict";
    }

    # Only requests that come with a password, or with nothing, are counted.
    map $session_known $login_attempt {
        default $binary_remote_addr;
        1 "";
    }
    limit_req_zone $login_attempt zone=logins:1m rate=10r/s;
    limit_req_status 429;

    map $http_upgrade $connection_header {
        default upgrade;
        "" "";
    }

    upstream jupyter {
        server unix:{{ .Values.proxy.run_dir }}/jupyter/jupyter.sock;
    }
    upstream tensorboard {
        server 127.0.0.1:{{ .Values.tensorboard.port }};
    }

    server {
        listen {{ with .Values.proxy.bind }}{{ . }}:{{ end }}{{ .Values.proxy.port }} ssl;
        server_name _;

        ssl_certificate {{ $config }}/tls/tls.crt;
        ssl_certificate_key {{ $config }}/tls/tls.key;
        ssl_protocols TLSv1.2 TLSv1.3;
        ssl_ciphers ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384:ECDHE-ECDSA-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305;
        ssl_prefer_server_ciphers off;
        ssl_session_cache shared:tls:2m;
        ssl_session_timeout 1h;
        ssl_session_tickets off;

        auth_basic $session_realm;
        auth_basic_user_file {{ $config }}/login/htpasswd;
        client_max_body_size 256m;

        location = /healthz {
            auth_basic off;
            default_type text/plain;
            return 200 "ok\n";
        }

        location / {
            {{- include "notebook.proxied" . | nindent 12 }}
            proxy_pass http://jupyter;
        }

        # Both written out: nginx would answer the one without a slash by itself, before it asks for a password.
        location = /tensorboard {
            {{- include "notebook.proxied" . | nindent 12 }}
            proxy_pass http://tensorboard;
        }

        location /tensorboard/ {
            {{- include "notebook.proxied" . | nindent 12 }}
            proxy_pass http://tensorboard;
        }

        # TensorBoard asks for its fonts without its prefix.
        location ~ ^/font-roboto/[A-Za-z0-9_-]+[.]woff2$ {
            {{- include "notebook.proxied" . | nindent 12 }}
            proxy_pass http://tensorboard/tensorboard$uri;
        }
    }
}
{{- end }}

{{- define "notebook.proxied" -}}
limit_req zone=logins burst=50 nodelay;
proxy_http_version 1.1;
proxy_set_header Host $http_host;
proxy_set_header Upgrade $http_upgrade;
proxy_set_header Connection $connection_header;
proxy_set_header X-Forwarded-For $remote_addr;
proxy_set_header X-Forwarded-Proto https;
proxy_set_header Authorization "";
proxy_read_timeout 1h;
proxy_send_timeout 1h;
proxy_max_temp_file_size 0;
proxy_hide_header X-Content-Type-Options;
proxy_hide_header X-Frame-Options;
proxy_hide_header Referrer-Policy;
add_header Set-Cookie $session_cookie;
add_header X-Content-Type-Options nosniff always;
add_header X-Frame-Options SAMEORIGIN always;
add_header Content-Security-Policy "frame-ancestors 'self'" always;
add_header Referrer-Policy same-origin always;
{{- if or .Values.tls.existing_secret .Values.tls.issuer }}
add_header Strict-Transport-Security "max-age=15768000" always;
{{- end }}
{{- end }}
