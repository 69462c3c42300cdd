package test

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// nobody is the ordinary user, of that name, as whom commands run when the tests
// run as root.
const nobody = 65534

// user runs commands as a user other than root, with a state directory of its
// own.
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
		text, err := os.ReadFile(process.Program(name))
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
	return &user{t: t, dir: dir, port: process.FreePort(t)}
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
func (u *user) up() (p *process.Process, pid string) {
	u.t.Helper()
	p = process.Start(u.t, u.command("fairlead", "up", "--secure-port", strconv.Itoa(u.port)))
	return p, p.Says(`nsenter .* -t (\d+)`)[1]
}

// in runs a shell command inside the namespace, the way up says.
func (u *user) in(pid, script string) *exec.Cmd {
	return u.command("nsenter", "--preserve-credentials", "-U", "-n", "-m", "-t", pid, "sh", "-c", script)
}

// An ordinary user runs all of it in a namespace of its own: kubectl works from
// outside, Services by address and by name from inside; it stops cleanly, and
// what was written is there after the next start.
func TestUpWithoutRoot(t *testing.T) {
	u := newUser(t)
	p, pid := u.up()
	process.Output(t, u.command("fairlead", "run", "-d", "-l", "app=MyApp", "-p", "http=9376", "--replicas", "2",
		"--ready", "http://:9376/healthz", "--", filepath.Join(u.dir, "backend")))
	manifest, err := os.ReadFile("../examples/my-service.yaml")
	if err != nil {
		t.Fatal(err)
	}
	apply := u.command("kubectl", "apply", "-f", "-")
	apply.Stdin = strings.NewReader(string(manifest))
	process.Output(t, apply)

	testbed.Until(t, "an answer through the names", func() error {
		curl := "curl -sS --max-time 5 http://my-service"
		out, stderr, code := process.Result(t, u.in(pid, curl+" && "+curl+".default.svc.cluster.local"))
		if code != 0 || strings.Count(out, "myapp-") != 2 {
			return fmt.Errorf("exit code %d: %s%s", code, out, stderr)
		}
		return nil
	})
	status := process.Output(t, u.command("fairlead", "status"))
	for _, want := range []string{"my-service", "2/2", "nothing is wrong"} {
		if !strings.Contains(status, want) {
			t.Errorf("fairlead status does not say %q:\n%s", want, status)
		}
	}
	metrics := process.Output(t, u.in(pid, "curl -sSf http://127.0.0.1:10249/metrics http://127.0.0.1:9153/metrics"))
	for _, series := range []string{"\nkubelet_started_pods_total 2\n", "\nprober_probe_total{", "\ncoredns_dns_requests_total{"} {
		if !strings.Contains(metrics, series) {
			t.Errorf("the metrics have no %q", series)
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
	if err := json.Unmarshal([]byte(process.Output(t, u.command("fairlead", "status", "-o", "json"))), &report); err != nil {
		t.Fatal(err)
	}
	found := false
	for _, s := range report.Services {
		found = found || s.Name == "my-service" && s.Ready == 2 && s.Total == 2
	}
	programmed := len(report.Nodes) == 1 && report.Nodes[0].Ready && report.Nodes[0].Programmed != nil &&
		report.Nodes[0].Programmed.ServicePorts > 0
	if !programmed || !found || len(report.Problems) > 0 {
		t.Errorf("fairlead status -o json says %+v", report)
	}
	if info, err := os.Stat(filepath.Join(u.dir, "state", "fairlead", "admin.kubeconfig")); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the kubeconfig's mode is %v (%v), want 0600", info.Mode(), err)
	}

	// It may find other things; the ports are those of the node that runs here.
	check, stderr, _ := process.Result(t, u.in(pid, filepath.Join(u.dir, "fairlead")+" check -o json --data-dir "+
		filepath.Join(u.dir, "state", "fairlead")))
	if !strings.Contains(check, "runs here and has its ports") || strings.Contains(check, "is in use") {
		t.Errorf("fairlead check beside it says %s%s", check, stderr)
	}
	u.confines(pid)
	if n := strings.Count(p.Log(), "are not kept apart by users"); n != 1 {
		t.Errorf("the log tells %d times that Pods have no users of their own:\n%s", n, p.Log())
	}
	u.tops()
	p.Stop()
	if out, _, code := process.Result(t, exec.Command("pgrep", "-f", u.dir)); code != 1 { // none
		t.Errorf("processes are left: exit code %d, %s", code, out)
	}

	p, _ = u.up()
	out := process.Output(t, u.command("kubectl", "get", "svc", "my-service", "-o", "jsonpath={.spec.ports[0].targetPort}"))
	if out != "9376" {
		t.Errorf("after the next start the Service's targetPort is %q", out)
	}
	p.Signal(os.Interrupt)
	if err := p.Wait(); err != nil {
		t.Errorf("fairlead up ended with %v after SIGINT", err)
	}
}

// tops asks for usage: that of the node, and why there is none of Pods where they have no
// control groups.
func (u *user) tops() {
	u.t.Helper()
	var report struct {
		Nodes []struct {
			MemoryBytes   uint64
			MemoryPercent int64
		}
	}
	if err := json.Unmarshal([]byte(process.Output(u.t, u.command("fairlead", "top", "nodes", "-o", "json"))), &report); err != nil {
		u.t.Fatal(err)
	}
	if len(report.Nodes) != 1 || report.Nodes[0].MemoryBytes < 10<<20 || report.Nodes[0].MemoryPercent > 100 {
		u.t.Errorf("fairlead top nodes says %+v", report)
	}
	if out := process.Output(u.t, u.command("kubectl", "top", "nodes")); !strings.Contains(out, "Mi") {
		u.t.Errorf("kubectl top nodes prints %q", out)
	}
	out, stderr, code := process.Result(u.t, u.command("fairlead", "top", "pods", "-l", "app=MyApp"))
	measured := code == 0 && strings.Count(out, "myapp-") == 2 && strings.Contains(out, "Mi")
	if !measured && (code != 1 || !strings.Contains(stderr, "does not measure Pods: ")) {
		u.t.Errorf("fairlead top pods: exit code %d\n%s%s", code, out, stderr)
	}
}

// What cannot work is reported in one line.
func TestUpErrors(t *testing.T) {
	u := newUser(t)
	_, _ = u.up()
	newer := filepath.Join(u.dir, "newer")
	process.Output(t, u.command("sh", "-c", "mkdir "+newer+" && echo 1000 > "+newer+"/version"))
	port := func() string { return strconv.Itoa(process.FreePort(t)) }
	for name, x := range map[string]struct {
		want string
		args []string
	}{
		"a second start on one data directory": {"is in use by", []string{"up", "--secure-port", port()}},
		"a taken port": {"the port is taken",
			[]string{"up", "--secure-port", strconv.Itoa(u.port), "--data-dir", filepath.Join(u.dir, "other")}},
		"a data directory of a newer version": {"newer fairlead",
			[]string{"up", "--secure-port", port(), "--data-dir", newer}},
		"a server without its etcd": {"cannot be reached",
			[]string{"server", "--secure-port", "0", "--data-dir", filepath.Join(u.dir, "noetcd"), "--etcd-servers", "http://127.0.0.1:1"}},
		"an agent without root": {"needs root", []string{"agent", "--server", "https://127.0.0.1:1", "--token", "x"}},
	} {
		_, stderr, code := process.Result(t, u.command("fairlead", x.args...))
		if code != 1 || !strings.Contains(stderr, x.want) || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%s: exit code %d, %q, want 1 and %q in one line", name, code, stderr, x.want)
		}
	}
}

// In the foreground 'fairlead run' shows the output of its Pods, and an interrupt
// deletes them.
func TestRunInForeground(t *testing.T) {
	u := newUser(t)
	u.up()
	p := process.Start(t, u.command("fairlead", "run", "--name", "talker", "--", "sh", "-c", "echo hello from $HOSTNAME; exec sleep 600"))
	p.Says(`talker-\w+: hello from talker-`)
	p.Signal(os.Interrupt)
	if err := p.Wait(); err != nil {
		t.Errorf("it ended with %v", err)
	}
	if out := process.Output(t, u.command("kubectl", "get", "pods", "-o", "name")); out != "" {
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
	process.Output(t, apply)
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
		testbed.Until(t, "the answer to "+question, func() error {
			out, stderr, code := process.Result(t, u.in(pid, "dig +short +time=2 +tries=1 "+question))
			if code != 0 || !strings.Contains(out, want) {
				return fmt.Errorf("exit code %d: %s%s", code, out, stderr)
			}
			return nil
		})
	}
	out := process.Output(t, u.in(pid, "dig +time=2 +tries=5 @10.96.0.10 none.default.svc.cluster.local A"))
	if !strings.Contains(out, "NXDOMAIN") || !strings.Contains(out, "SOA") {
		t.Errorf("a name that does not exist gets\n%s", out)
	}
}

// Pods outlive a 'fairlead up' that is killed, in namespaces that its successor has no
// rights in: the next start starts them again, and after another kill 'fairlead
// cleanup' of the same user leaves nothing of them.
func TestUpIsKilled(t *testing.T) {
	u := newUser(t)
	kill := func(p *process.Process, pid string) {
		t.Helper()
		process.Output(t, exec.Command("kill", "-KILL", pid)) // the one inside; the other follows it
		if err := p.Wait(); err == nil {
			t.Error("fairlead up has ended well")
		}
	}
	p, pid := u.up()
	process.Output(t, u.command("fairlead", "run", "-d", "-l", "app=MyApp", "-p", "http=9376", "--replicas", "2",
		"--ready", "http://:9376/healthz", "--", filepath.Join(u.dir, "backend")))
	manifest, err := os.ReadFile("../examples/my-service.yaml")
	if err != nil {
		t.Fatal(err)
	}
	apply := u.command("kubectl", "apply", "-f", "-")
	apply.Stdin = strings.NewReader(string(manifest))
	process.Output(t, apply)
	answers := func(pid string) {
		t.Helper()
		testbed.Until(t, "both Pods to answer", func() error {
			out, stderr, code := process.Result(t, u.in(pid, "for i in 1 2 3 4 5 6 7 8; do curl -sS --max-time 5 http://my-service || exit; done"))
			pods := map[string]bool{}
			for _, word := range strings.Fields(out) {
				if strings.HasPrefix(word, "myapp-") {
					pods[word] = true
				}
			}
			if code != 0 || len(pods) < 2 {
				return fmt.Errorf("exit code %d: %s%s", code, out, stderr)
			}
			return nil
		})
	}
	answers(pid)
	kill(p, pid)
	p, pid = u.up()
	answers(pid)
	kill(p, pid)
	process.Output(t, u.command("fairlead", "cleanup"))
	if out, _, code := process.Result(t, exec.Command("pgrep", "-f", u.dir)); code != 1 { // none
		t.Errorf("processes are left: exit code %d, %s", code, out)
	}
	if left, err := os.ReadDir(filepath.Join(u.dir, "state", "fairlead", "agent")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("state of the node is left: %v, %v", left, err)
	}
}
