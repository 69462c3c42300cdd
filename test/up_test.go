package test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// nobody is the ordinary user that the tests become when they run as root.
const nobody = 65534

// user runs commands as somebody who is not root, with a state directory of
// their own.
type user struct {
	t    *testing.T
	dir  string
	port int
}

func newUser(t *testing.T) *user {
	t.Helper()
	// Not t.TempDir: its parents are closed to other users.
	dir, err := os.MkdirTemp("", "fairlead-up-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, name := range []string{"fairlead", "backend", "kubectl"} {
		text, err := os.ReadFile(program(name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(dir, nobody, nobody); err != nil {
			t.Fatal(err)
		}
	}
	return &user{t: t, dir: dir, port: freePort(t)}
}

// freePort is a port of 127.0.0.1 that nobody listens on. It lies outside of the
// range from which the kernel gives ports to everyone else, so that it is still
// free when the program comes to it.
func freePort(t *testing.T) int {
	t.Helper()
	for range 100 {
		port := 20000 + rand.IntN(10000)
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err == nil {
			_ = l.Close()
			return port
		}
	}
	t.Fatal("no free port between 20000 and 29999")
	return 0
}

func (u *user) command(name string, args ...string) *exec.Cmd {
	if !strings.Contains(name, "/") {
		if local := filepath.Join(u.dir, name); exists(local) {
			name = local
		}
	}
	cmd := exec.Command(name, args...)
	cmd.Dir = u.dir
	cmd.Env = append(os.Environ(), "HOME="+u.dir, "XDG_STATE_HOME="+filepath.Join(u.dir, "state"),
		"KUBECONFIG="+filepath.Join(u.dir, "state", "fairlead", "admin.kubeconfig"))
	if os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	return cmd
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// up starts 'fairlead up' and waits for its summary.
func (u *user) up() (p *process, pid int) {
	u.t.Helper()
	p = start(u.t, u.command("fairlead", "up", "--secure-port", strconv.Itoa(u.port)))
	var enter []string
	until(u.t, "fairlead up to be up", 60*time.Second, func() error {
		enter = regexp.MustCompile(`nsenter .* -t (\d+)`).FindStringSubmatch(read(p.stdout))
		if enter == nil {
			return fmt.Errorf("it has printed %q and %q", read(p.stdout), read(p.stderr))
		}
		return nil
	})
	pid, _ = strconv.Atoi(enter[1])
	return p, pid
}

// in runs a shell command inside the namespace, the way up says.
func (u *user) in(pid int, script string) *exec.Cmd {
	return u.command("nsenter", "--preserve-credentials", "-U", "-n", "-m", "-t", strconv.Itoa(pid), "sh", "-c", script)
}

// An ordinary user runs all of it in a namespace of its own: kubectl works from
// outside, Services by address and by name from inside; it stops cleanly, and
// what was written is there after the next start.
func TestUpWithoutRoot(t *testing.T) {
	u := newUser(t)
	p, pid := u.up()
	output(t, u.command("fairlead", "run", "-d", "-l", "app=MyApp", "-p", "http=9376", "--replicas", "2",
		"--ready", "http://:9376/healthz", "--", filepath.Join(u.dir, "backend")))
	manifest, err := os.ReadFile("../examples/my-service.yaml")
	if err != nil {
		t.Fatal(err)
	}
	apply := u.command("kubectl", "apply", "-f", "-")
	apply.Stdin = strings.NewReader(string(manifest))
	output(t, apply)

	until(t, "an answer through the names", 30*time.Second, func() error {
		out, stderr, code := result(t, u.in(pid, "curl -sS --max-time 5 http://my-service && curl -sS --max-time 5 http://my-service.default.svc.cluster.local"))
		if code != 0 || strings.Count(out, "myapp-") != 2 {
			return fmt.Errorf("exit code %d: %s%s", code, out, stderr)
		}
		return nil
	})
	status := output(t, u.command("fairlead", "status"))
	for _, want := range []string{"my-service", "2/2", "nothing is wrong"} {
		if !strings.Contains(status, want) {
			t.Errorf("fairlead status does not say %q:\n%s", want, status)
		}
	}
	var report struct {
		Nodes []struct {
			Ready      bool
			Programmed *struct{ ServicePorts int }
		}
		Services []struct {
			Name         string
			Ready, Total int
		}
		Problems []string
	}
	if err := json.Unmarshal([]byte(output(t, u.command("fairlead", "status", "-o", "json"))), &report); err != nil {
		t.Fatal(err)
	}
	found := false
	for _, s := range report.Services {
		found = found || s.Name == "my-service" && s.Ready == 2 && s.Total == 2
	}
	if len(report.Nodes) != 1 || !report.Nodes[0].Ready || report.Nodes[0].Programmed == nil || report.Nodes[0].Programmed.ServicePorts == 0 || !found || len(report.Problems) > 0 {
		t.Errorf("fairlead status -o json says %+v", report)
	}
	if info, err := os.Stat(filepath.Join(u.dir, "state", "fairlead", "admin.kubeconfig")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the kubeconfig's mode is %v (%v), want 0600", info.Mode(), err)
	}

	p.stop(t)
	if p.err != nil {
		t.Errorf("fairlead up ended with %v after SIGTERM", p.err)
	}
	if out, _, code := result(t, exec.Command("pgrep", "-f", u.dir)); code != 1 { // none
		t.Errorf("processes are left: exit code %d, %s", code, out)
	}

	p, _ = u.up()
	if out := output(t, u.command("kubectl", "get", "svc", "my-service", "-o", "jsonpath={.spec.ports[0].targetPort}")); out != "9376" {
		t.Errorf("after the next start the Service's targetPort is %q", out)
	}
	p.Process.Signal(os.Interrupt)
	select {
	case <-p.done:
		if p.err != nil {
			t.Errorf("fairlead up ended with %v after SIGINT", p.err)
		}
	case <-time.After(60 * time.Second):
		t.Error("fairlead up does not end after SIGINT")
	}
}

// What cannot work is said in one line.
func TestUpRefusals(t *testing.T) {
	u := newUser(t)
	_, _ = u.up()
	again := u.command("fairlead", "up", "--secure-port", strconv.Itoa(freePort(t)))
	if _, stderr, code := result(t, again); code != 1 || !strings.Contains(stderr, "is in use by") || strings.Count(stderr, "\n") != 1 {
		t.Errorf("second start on one data directory: exit code %d, %q", code, stderr)
	}
	taken := u.command("fairlead", "up", "--secure-port", strconv.Itoa(u.port), "--data-dir", filepath.Join(u.dir, "other"))
	if _, stderr, code := result(t, taken); code != 1 || !strings.Contains(stderr, "the port is taken") || strings.Count(stderr, "\n") != 1 {
		t.Errorf("start on a taken port: exit code %d, %q", code, stderr)
	}
	newer := filepath.Join(u.dir, "newer")
	output(t, u.command("mkdir", newer))
	output(t, u.command("sh", "-c", "echo 1000 > "+newer+"/version"))
	future := u.command("fairlead", "up", "--secure-port", strconv.Itoa(freePort(t)), "--data-dir", newer)
	if _, stderr, code := result(t, future); code != 1 || !strings.Contains(stderr, "newer fairlead") || strings.Count(stderr, "\n") != 1 {
		t.Errorf("start on a data directory of a newer version: exit code %d, %q", code, stderr)
	}
	noEtcd := u.command("fairlead", "server", "--secure-port", "0", "--data-dir", filepath.Join(u.dir, "noetcd"), "--etcd-servers", "http://127.0.0.1:1")
	if _, stderr, code := result(t, noEtcd); code != 1 || !strings.Contains(stderr, "cannot be reached") || strings.Count(stderr, "\n") != 1 {
		t.Errorf("server without its etcd: exit code %d, %q", code, stderr)
	}
	agent := u.command("fairlead", "agent", "--server", "https://127.0.0.1:1", "--token", "x")
	if _, stderr, code := result(t, agent); code != 1 || !strings.Contains(stderr, "needs root") || strings.Count(stderr, "\n") != 1 {
		t.Errorf("agent without root: exit code %d, %q", code, stderr)
	}
}

// In the foreground 'fairlead run' shows the output of its Pods, and an interrupt
// deletes them.
func TestRunInForeground(t *testing.T) {
	u := newUser(t)
	u.up()
	p := start(t, u.command("fairlead", "run", "--name", "talker", "--", "sh", "-c", "echo hello from $HOSTNAME; exec sleep 600"))
	until(t, "the Pod's output", 30*time.Second, func() error {
		if !regexp.MustCompile(`talker-\w+: hello from talker-`).MatchString(read(p.stdout)) {
			return fmt.Errorf("it has printed %q and %q", read(p.stdout), read(p.stderr))
		}
		return nil
	})
	if err := p.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.done:
	case <-time.After(60 * time.Second):
		t.Fatal("it did not end after an interrupt")
	}
	if p.err != nil {
		t.Errorf("it ended with %v", p.err)
	}
	if out := output(t, u.command("kubectl", "get", "pods", "-o", "name")); out != "" {
		t.Errorf("Pods are left: %s", out)
	}
}

// The cluster's DNS answers at the tenth address of both ranges, over UDP and TCP,
// as dig asks it (behaviours 73 to 75, 78, 81, 150, 151).
func TestDNSThroughTheService(t *testing.T) {
	u := newUser(t)
	_, pid := u.up()
	apply := u.command("kubectl", "apply", "-f", "-")
	apply.Stdin = strings.NewReader(`
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  clusterIP: 10.96.7.7
  ports: [{name: http, port: 80}]
---
apiVersion: v1
kind: Service
metadata: {name: db}
spec: {type: ExternalName, externalName: my.database.example.com}
`)
	output(t, apply)
	for question, want := range map[string]string{
		"@10.96.0.10 web.default.svc.cluster.local A":                     "10.96.7.7",
		"@10.96.0.10 +tcp web.default.svc.cluster.local A":                "10.96.7.7",
		"@fd00:10:96::a web.default.svc.cluster.local A":                  "10.96.7.7",
		"@10.96.0.10 _http._tcp.web.default.svc.cluster.local SRV":        "80 web.default.svc.cluster.local.",
		"@10.96.0.10 -x 10.96.7.7":                                        "web.default.svc.cluster.local.",
		"@10.96.0.10 db.default.svc.cluster.local CNAME":                  "my.database.example.com.",
		"@10.96.0.10 +search web A":                                       "10.96.7.7",
		"@fd00:10:96::a +tcp kube-dns.kube-system.svc.cluster.local AAAA": "fd00:10:96::a",
	} {
		until(t, "the answer to "+question, 10*time.Second, func() error {
			out, stderr, code := result(t, u.in(pid, "dig +short +time=2 +tries=1 "+question))
			if code != 0 || !strings.Contains(out, want) {
				return fmt.Errorf("exit code %d: %s%s", code, out, stderr)
			}
			return nil
		})
	}
	if out := output(t, u.in(pid, "dig +time=2 +tries=1 @10.96.0.10 none.default.svc.cluster.local A")); !strings.Contains(out, "NXDOMAIN") || !strings.Contains(out, "SOA") {
		t.Errorf("a name that is not there gets\n%s", out)
	}
}
