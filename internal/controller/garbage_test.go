package controller

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// garbageRig runs kubectl against a server with the collector.
type garbageRig struct {
	testing.TB
	program, kubeconfig string
}

func newGarbageRig(t *testing.T) *garbageRig {
	t.Helper()
	program := os.Getenv("FAIRLEAD_KUBECTL")
	if program == "" {
		var err error
		if program, err = exec.LookPath("kubectl"); err != nil {
			t.Skip("no kubectl in PATH and none named by FAIRLEAD_KUBECTL")
		}
	}
	s := apiservertest.StartServer(t)
	(&rig{TB: t, config: s.ControllersConfig()}).run(Options{Controllers: []string{GarbageName}})
	return &garbageRig{t, program, s.Kubeconfig()}
}

func (k *garbageRig) try(stdin, args string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, k.program, strings.Fields(args)...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+k.kubeconfig)
	cmd.Stdin = strings.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func (k *garbageRig) kubectl(args string) string {
	k.Helper()
	out, err := k.try("", args)
	if err != nil {
		k.Fatalf("kubectl %s: %v: %s", args, err, out)
	}
	return out
}

// create makes an object, with an owner unless it is "", and returns the reference
// to it as an owner that its deletion waits for.
func (k *garbageRig) create(version, kind, name, owner string) string {
	k.Helper()
	manifest := fmt.Sprintf("apiVersion: %s\nkind: %s\nmetadata:\n  name: %s\n", version, kind, name)
	if owner != "" {
		manifest += "  ownerReferences:\n  - " + owner + "\n"
	}
	if kind == "Backup" {
		manifest += "spec:\n  source: disk\n"
	}
	if out, err := k.try(manifest, "create -f -"); err != nil {
		k.Fatalf("%s: %s", manifest, out)
	}
	uid := k.kubectl("get " + kind + " " + name + " -o jsonpath={.metadata.uid}")
	return fmt.Sprintf("{apiVersion: %s, kind: %s, name: %s, uid: %s, blockOwnerDeletion: true}", version, kind, name, uid)
}

func (k *garbageRig) wantGone(what ...string) {
	k.Helper()
	for _, w := range what {
		if out, err := k.try("", "wait --for=delete --timeout=30s "+w); err != nil {
			k.Fatalf("%s stays: %s", w, out)
		}
	}
}

// Deletion in the three ways, of owners and dependents of built-in and custom
// kinds, in both directions.
func TestGarbageOfAnyKind(t *testing.T) {
	k := newGarbageRig(t)
	// A dependent made before its owner's kind is served waits for it.
	k.create("v1", "ConfigMap", "early", "{apiVersion: example.com/v1, kind: Backup, name: none, uid: \"0\"}")
	k.kubectl("apply -f ../apiserver/testdata/backups.yaml")
	k.kubectl("wait --for=condition=Established crd/backups.example.com --timeout=30s")
	k.wantGone("configmap/early")

	owner := k.create("example.com/v1", "Backup", "back", "")
	k.create("v1", "ConfigMap", "child", owner)
	middle := k.create("v1", "Secret", "middle", owner)
	k.create("example.com/v1", "Backup", "leaf", middle)
	k.kubectl("delete backup back --cascade=background")
	k.wantGone("configmap/child", "secret/middle", "backup/leaf")

	owner = k.create("v1", "ConfigMap", "fore", "")
	middle = k.create("example.com/v1", "Backup", "middle", owner)
	k.create("v1", "Secret", "leaf", middle)
	k.kubectl("patch secret leaf --type=merge -p {\"metadata\":{\"finalizers\":[\"example.com/hold\"]}}")
	k.kubectl("delete configmap fore --cascade=foreground --wait=false")
	if _, err := k.try("", "wait --for=jsonpath={.metadata.deletionTimestamp} --timeout=30s secret/leaf"); err != nil {
		t.Error("the leaf is not deleted")
	}
	if out := k.kubectl("get configmap/fore backup/middle -o name"); strings.Count(out, "\n") != 1 {
		t.Errorf("owners that wait for a dependent: %s", out)
	}
	k.kubectl("patch secret leaf --type=merge -p {\"metadata\":{\"finalizers\":null}}")
	k.wantGone("secret/leaf", "backup/middle", "configmap/fore")

	owner = k.create("example.com/v1", "Backup", "orphaning", "")
	k.create("v1", "ConfigMap", "orphan", owner)
	k.create("example.com/v1", "Backup", "orphan", owner)
	k.kubectl("delete backup orphaning --cascade=orphan")
	for _, kind := range []string{"configmap", "backup"} {
		if out := k.kubectl("get " + kind + " orphan -o jsonpath={.metadata.ownerReferences}{.metadata.deletionTimestamp}"); out != "" {
			t.Errorf("the orphaned %s has %s", kind, out)
		}
	}

	// Of two owners one goes: the reference goes with it, the dependent stays.
	first, second := k.create("v1", "ConfigMap", "first", ""), k.create("v1", "Secret", "second", "")
	k.create("v1", "ConfigMap", "shared", first+"\n  - "+second)
	k.kubectl("delete configmap first")
	k.kubectl("wait configmap shared --for=jsonpath={.metadata.ownerReferences[0].name}=second --timeout=30s")
	k.kubectl("delete secret second")
	k.wantGone("configmap/shared")
}

// A circle of owners does not wait for itself.
func TestGarbageInACircle(t *testing.T) {
	k := newGarbageRig(t)
	a := k.create("v1", "ConfigMap", "a", "")
	k.create("v1", "ConfigMap", "b", a)
	uid := k.kubectl("get configmap b -o jsonpath={.metadata.uid}")
	k.kubectl(`patch configmap a --type=merge -p {"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"ConfigMap","name":"b","uid":"` +
		uid + `","blockOwnerDeletion":true}]}}`)
	k.kubectl("delete configmap a --cascade=foreground --timeout=30s")
	k.wantGone("configmap/a", "configmap/b")
}
