{{- define "notebook.jupyter" -}}
{
  "ServerApp": {
    "sock": "{{ .Values.proxy.run_dir }}/jupyter/jupyter.sock",
    "sock_mode": "0600",
    "open_browser": false,
    "allow_remote_access": true,
    "trust_xheaders": true,
    "quit_button": false
  },
  "IdentityProvider": {
    "token": ""
  },
  "KernelManager": {
    "transport": "ipc"
  },
  "LabApp": {
    "extension_manager": "readonly",
    "news_url": null,
    "check_for_updates_class": "jupyterlab.NeverCheckForUpdate"
  }
}
{{- end }}
