package apiserver_test

import (
	"bufio"
	"context"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/controller"
)

// What kubectl does with custom resources, and what it does for a long time or
// to many objects.
func TestKubectlKinds(t *testing.T) {
	t.Parallel()
	program := kubectl(t)
	s := apiservertest.StartServer(t)
	collected := make(chan error, 1)
	collect, stop := context.WithCancel(context.Background())
	go func() {
		collected <- controller.Run(collect, controller.Options{Config: s.ControllersConfig(), Controllers: []string{controller.GarbageName}})
	}()
	defer func() {
		stop()
		if err := <-collected; err != nil {
			t.Error(err)
		}
	}()
	home := t.TempDir()
	k := kubectlOf{t, program, s.Kubeconfig(), home}
	write(t, home, "crd.yaml", string(mustRead(t, "testdata/backups.yaml")))
	one := strings.Replace(backup("one", "{source: disk}"), "metadata: {", "metadata: {namespace: default, ", 1)
	write(t, home, "backup.yaml", block(t, one))
	write(t, home, "changed.yaml", block(t, backup("one", "{source: disk, keep: 30}")))
	if err := os.Mkdir(filepath.Join(home, "set"), 0o700); err != nil {
		t.Fatal(err)
	}
	config := func(name string) string {
		return block(t, "{apiVersion: v1, kind: ConfigMap, metadata: {name: "+name+", labels: {set: a}}, data: {k: v}}")
	}
	write(t, home, "set/1.yaml", config("first"))
	write(t, home, "set/2.yaml", config("second"))
	write(t, home, "event.yaml", block(t, `{apiVersion: v1, kind: Event, metadata: {name: e, namespace: default},
		type: Warning, reason: Broken, message: it broke, count: 1,
		involvedObject: {apiVersion: v1, kind: Service, name: kubernetes, namespace: default}, lastTimestamp: "2024-01-01T00:00:00Z"}`))

	k.steps([]kubectlStep{
		{"apply -f crd.yaml", []string{"customresourcedefinition.apiextensions.k8s.io/backups.example.com created"}},
		{"wait --for=condition=Established crd/backups.example.com --timeout=60s", []string{"condition met"}},
		{"apply -f crd.yaml", []string{"unchanged"}},
	})
	eventually(t, "discovery has the new kind", func() bool {
		out, err := k.command("api-resources --api-group=example.com --cached=false").CombinedOutput()
		return err == nil && strings.Join(strings.Fields(string(out)),
			" ") == "NAME SHORTNAMES APIVERSION NAMESPACED KIND backups bk example.com/v1 true Backup"
	})
	k.steps([]kubectlStep{
		{"apply -f backup.yaml", []string{"backup.example.com/one created"}},
		{"get bk", []string{"SOURCE", "KEEP", "disk", "7"}},
		{"get backups.v1beta1.example.com", []string{"Warning: example.com/v1beta1 Backup is deprecated; use v1"}},
		{"get all", []string{"backup.example.com/one", "service/kubernetes"}},
		{"diff -f changed.yaml", []string{"!", "-  keep: 7", "+  keep: 30"}},
		{"describe backup one", []string{"Name:         one", "Source:    disk"}},
		{`patch bk one --type=merge -p {"spec":{"keep":0}}`, []string{"!", "spec.keep"}},
		{`patch bk one --type=json -p [{"op":"replace","path":"/spec/keep","value":8}]`, []string{"backup.example.com/one patched"}},
		{"scale bk/one --replicas=3", []string{"backup.example.com/one scaled"}},
		{"get bk one -o jsonpath={.spec.replicas}", []string{"3"}},
		{"wait bk/one --for=jsonpath={.spec.keep}=8 --timeout=60s", []string{"condition met"}},
		{"apply --server-side -f changed.yaml --field-manager=b", []string{"!", "conflict", ".spec.keep"}},
		{"api-versions", []string{"apiextensions.k8s.io/v1", "example.com/v1", "example.com/v1beta1"}},
		{"apply -f set --prune -l set=a --prune-allowlist=core/v1/ConfigMap", []string{"configmap/first created", "configmap/second created"}},
		{"create -f event.yaml", []string{"event/e created"}},
		{"events --for service/kubernetes", []string{"Warning", "Broken", "it broke"}},
	})
	eventually(t, "explain knows the new kind", func() bool {
		out, err := k.command("explain backup.spec.schedule").CombinedOutput()
		return err == nil && strings.Contains(string(out), "hourly")
	})
	k.watch("get configmaps -l set=a --watch -o name", "configmap/third", func() {
		write(t, home, "third.yaml", config("third"))
		k.steps([]kubectlStep{{"apply -f third.yaml", []string{"created"}}})
	})
	if err := os.Remove(filepath.Join(home, "set", "2.yaml")); err != nil {
		t.Fatal(err)
	}
	k.steps([]kubectlStep{
		{"apply -f set --prune -l set=a --prune-allowlist=core/v1/ConfigMap", []string{"configmap/first unchanged", "configmap/second pruned",
			"configmap/third pruned"}},
		{"delete configmap first --cascade=foreground", []string{`configmap "first" deleted`}},
		{"delete bk one --cascade=orphan", []string{`"one" deleted`}},
		{"wait --for=delete bk/one --timeout=60s", nil},
		{"delete crd backups.example.com", []string{`"backups.example.com" deleted`}},
	})
}

// watch runs a command that does not end until it has written the wanted line,
// which act causes.
func (k kubectlOf) watch(args, want string, act func()) {
	k.Helper()
	cmd := k.command(args)
	out, err := cmd.StdoutPipe()
	if err != nil {
		k.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		k.Fatal(err)
	}
	lines := make(chan string)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			lines <- s.Text()
		}
	}()
	acted, found := false, false
	deadline := time.After(waitTimeout)
	for !found {
		select {
		case line, more := <-lines:
			if !more {
				k.Fatalf("kubectl %s has ended", args)
			}
			if !acted { // the first line: it watches
				acted = true
				act()
			}
			found = line == want
		case <-deadline:
			k.Errorf("kubectl %s: no line %q", args, want)
			found = true
		}
	}
	_ = cmd.Process.Signal(syscall.SIGINT)
	for range lines { // until it has ended
	}
	_ = cmd.Wait()
}

// block returns a manifest in YAML's block style. A kubectl before v1.35 takes a
// file that begins with a brace for JSON.
func block(t *testing.T, flow string) string {
	t.Helper()
	out, err := yaml.JSONToYAML([]byte(flow))
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}
