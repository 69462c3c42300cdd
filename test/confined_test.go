package test

import (
	"encoding/json"
	"path/filepath"
	"strings"

	"github.com/fairlead/fairlead/internal/testbed/process"
)

// confines fails unless, without root, a Pod that may not be privileged is confined
// in its files, processes and system calls. It is not kept apart by users, which a condition
// of the Node reports. pid is the agent's.
func (u *user) confines(pid string) {
	t := u.t
	t.Helper()
	apply := u.command("kubectl", "apply", "-f", "-")
	apply.Stdin = strings.NewReader(`
apiVersion: v1
kind: Namespace
metadata: {name: tenant, labels: {pod-security.kubernetes.io/enforce: baseline}}
`)
	process.Output(t, apply)
	process.Output(t, u.command("kubectl", "-n", "tenant", "wait", "--for=create", "--timeout=2m", "serviceaccount/default"))
	script := `
		try() { what=$1; shift; if "$@" >/dev/null 2>&1; then echo "did: $what"; else echo "not: $what"; fi; }
		try "read the key" cat ` + filepath.Join(u.dir, "state/fairlead/pki/ca.key") + `
		try "see the state" ls ` + filepath.Join(u.dir, "state/fairlead") + `
		try "see the agent" test -e /proc/` + pid + `
		try "signal the agent" kill -0 ` + pid + `
		try "read the first" cat /proc/1/environ
		try "signal the first" kill -0 1
		try "write to /etc" touch /etc/attacked
		try "write to /srv" touch /srv/attacked
		try "write a sysctl" sh -c 'echo x > /proc/sys/kernel/domainname'
		try "make a user namespace" unshare -U true
		try "make a mount namespace" unshare -m true
		try "mount" mount -t tmpfs none /tmp
		try "change the network" ip link set lo mtu 60000
		try "may write to a volume" touch /opt/mine
		try "may write to /tmp" touch /tmp/mine
		try "may write to /dev/null" sh -c 'echo > /dev/null'
		try "may open its output" sh -c 'echo > /dev/stdout'
		grep -E '^(Uid|CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status | tr '\t' ' '
		ls /tmp /root
	`
	pod := u.command("kubectl", "apply", "-f", "-")
	pod.Stdin = strings.NewReader(`{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "attack", "namespace": "tenant"}, "spec": {
		"restartPolicy": "Never", "volumes": [{"name": "v", "emptyDir": {}}], "containers": [{"name": "main", "image": "host",
		"command": ["sh", "-c", ` + quoted(script) + `], "volumeMounts": [{"name": "v", "mountPath": "/opt"}]}]}}`)
	process.Output(t, pod)
	process.Output(t, u.command("kubectl", "-n", "tenant", "wait", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=2m", "pod/attack"))
	out := process.Output(t, u.command("kubectl", "-n", "tenant", "logs", "attack"))
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(line)
		// Its first process, of the same user, it may ask to end, and with it itself.
		if strings.HasPrefix(line, "did: ") && !strings.HasPrefix(line, "did: may ") && line != "did: signal the first" {
			t.Errorf("a confined Pod %s", line)
		}
	}
	for _, want := range []string{
		"did: may write to a volume", "did: may write to /tmp", "did: may write to /dev/null", "did: may open its output",
		"not: read the key", "not: change the network", "Uid: 1000 1000 1000 1000", "CapEff: 0000000000000000", "Seccomp: 2",
		"/root:\n\n/tmp:\nmine",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	node := process.Output(t, u.command("kubectl", "get", "nodes", "-o",
		`jsonpath={range .items[0].status.conditions[?(@.type=="fairlead.dev/PodsConfined")]}{.status} {.reason}{end}`))
	if node != "False OneUser" {
		t.Errorf("the Node's condition is %q", node)
	}
}

func quoted(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return string(b)
}
