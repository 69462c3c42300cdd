package node

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

const nginxConfig = `daemon off; master_process off; pid DIR/nginx.pid; error_log stderr;
events {}
http { access_log off; server { listen 8088; location / { return 200 "nginx\n"; } } }
`

const haproxyConfig = `defaults
  mode http
  timeout connect 5s
  timeout client 5s
  timeout server 5s
frontend web
  bind :8089
  http-request return status 200 content-type text/plain string haproxy
`

// testPrograms registers programs of Debian, each in one of the ways to know when it is ready: they
// are reached by their Services, leave when they are killed, and come back.
func testPrograms(t *testing.T, c *cluster) {
	dir := t.TempDir()
	for file, text := range map[string]string{"nginx.conf": nginxConfig, "haproxy.conf": haproxyConfig} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(strings.ReplaceAll(text, "DIR", dir)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range []struct {
		name, port     string
		command, ready []string
		ask, want      string
	}{
		{
			name: "redis", port: "6379", ready: []string{"--pid-file", dir + "/redis.pid", "--ready", "exec:redis-cli ping | grep -q PONG"},
			command: []string{"redis-server", "--port", "6379", "--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--dir", dir,
				"--pidfile", dir + "/redis.pid"},
			ask: "redis-cli -h HOST ping", want: "PONG",
		},
		{
			name: "nginx", port: "8088", ready: []string{"--ready", "http://:8088/"},
			command: []string{"nginx", "-c", dir + "/nginx.conf"}, ask: "curl -sSf --max-time 5 http://HOST:8088/", want: "nginx",
		},
		{
			name: "haproxy", port: "8089",
			command: []string{"haproxy", "-db", "-f", dir + "/haproxy.conf"}, ask: "curl -sSf --max-time 5 http://HOST:8089/", want: "haproxy",
		},
	} {
		start := func() *process.Process { return process.Start(t, c.on(c.node, p.command[0], p.command[1:]...)) }
		program := start()
		c.kubectl("create", "service", "clusterip", p.name, "--tcp", p.port+":"+p.port)
		process.Output(t, c.fairlead(c.server, append([]string{"register", "--node", c.node.Name(), "--name", p.name, "-l", "app=" + p.name,
			"-p", p.port, "--timeout", "0"}, p.ready...)...))
		ask := strings.Fields(strings.ReplaceAll(p.ask, "HOST", c.kubectl("get", "service", p.name, "-o", "jsonpath={.spec.clusterIP}")))
		answers := func() error {
			out, err := process.Try(c.on(c.node, ask[0], ask[1:]...))
			if err == nil && strings.TrimSpace(out) != p.want {
				err = errors.New(out)
			}
			return err
		}
		testbed.Until(t, p.name+" by its Service", answers)
		program.Kill()
		testbed.Until(t, "the end of "+p.name, func() error {
			out := c.kubectl("get", "endpointslices", "-l", "kubernetes.io/service-name="+p.name,
				"-o", "jsonpath={.items[*].endpoints[*].conditions.ready}")
			if answers() == nil || strings.Contains(out, "true") {
				return errors.New("it is an endpoint: " + out)
			}
			return nil
		})
		program = start()
		testbed.Until(t, p.name+" after its restart", answers)
		program.Kill() // haproxy ends by the signal at SIGTERM, too
	}
}
