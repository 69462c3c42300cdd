package proxied

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
	"github.com/fairlead/fairlead/internal/testbed"
)

// Debian's nginx and HAProxy read the PROXY protocol that Pods are sent, in both versions (behaviours 121, 173).
func TestServersReadTheProxyProtocol(t *testing.T) {
	for _, c := range []struct {
		program, config string
		args            []string
	}{
		{"nginx", `daemon off; master_process off; error_log stderr; pid %[1]s/pid;
events {}
http {
  access_log off;
  client_body_temp_path %[1]s; proxy_temp_path %[1]s; fastcgi_temp_path %[1]s; uwsgi_temp_path %[1]s; scgi_temp_path %[1]s;
  server { listen %[2]s proxy_protocol; location / { return 200 "$proxy_protocol_addr"; } }
}
`, []string{"-e", "stderr", "-c"}},
		{"haproxy", `defaults
  mode http
  timeout connect 30s
  timeout client 30s
  timeout server 30s
frontend f # in %[1]s
  bind %[2]s accept-proxy
  http-request return status 200 content-type text/plain lf-string "%%[src]"
`, []string{"-db", "-f"}},
	} {
		t.Run(c.program, func(t *testing.T) {
			program, err := exec.LookPath(c.program)
			if err != nil {
				program = "/usr/sbin/" + c.program
			}
			pod := (&lbtest.Rig{TB: t}).Free()
			dir := t.TempDir()
			file := filepath.Join(dir, "config")
			if err := os.WriteFile(file, fmt.Appendf(nil, c.config, dir, pod), 0o600); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			server := exec.CommandContext(ctx, program, append(c.args, file)...)
			var out lbtest.Buffer
			server.Stdout, server.Stderr = &out, &out
			if err := server.Start(); err != nil {
				t.Fatalf("%v; test/setup.sh installs it", err)
			}
			defer func() { cancel(); _ = server.Wait() }()
			for _, version := range []string{"v1", "v2"} {
				r := newRig(t, map[string]string{"fairlead.dev/lb-proxy-protocol": version})
				r.set(pod)
				from := &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 9, 8, 7)}}
				client := &http.Client{Timeout: 10 * time.Second,
					Transport: &http.Transport{DialContext: from.DialContext, DisableKeepAlives: true}}
				testbed.Until(t, version, func() error {
					answer, err := client.Get("http://" + r.At.String())
					if err != nil {
						return fmt.Errorf("%w\n%s", err, out.String())
					}
					defer answer.Body.Close()
					if text, err := io.ReadAll(answer.Body); err != nil || string(text) != "127.9.8.7" {
						return fmt.Errorf("%q, %w", text, err)
					}
					return nil
				})
			}
		})
	}
}
