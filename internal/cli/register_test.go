package cli

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/registration"
)

// Wrong flags of register are one line with the flag, and no request; a dry run needs no
// server.
func TestRegisterFlags(t *testing.T) {
	t.Setenv("KUBECONFIG", "/nonexistent")
	for want, args := range map[string]string{
		"which program?":                        "-p 80",
		"--port: on which port":                 "--name a",
		"--port: \"x\": want [NAME=]PORT":       "--name a -p x",
		"--pid-file: \"x\": want an absolute":   "--name a -p 80 --pid-file x",
		"--address: \"::1\": other nodes":       "--name a -p 80 --address ::1",
		"--ready: \"80\": want http":            "--name a -p 80 --ready 80",
		"--labels \"a\"":                        "--name a -p 80 -l a",
		"--unit: \"a b.service\": want":         "--name a -p 80 --unit a\x00b",
		"--name and --file: the file says it":   "--name a -f x.yaml",
		"--output is for --dry-run":             "--name a -p 80 -o yaml",
		"--install-hook is for a --unit":        "--name a -p 80 --install-hook",
		"--name: \"A\": a lowercase RFC 1123":   "--name A -p 80",
		"which program? for example: fairlead ": "",
	} {
		var out, err bytes.Buffer
		line := append([]string{"register"}, strings.Fields(args)...)
		if args == "" {
			line = []string{"deregister"}
		}
		for i := range line {
			line[i] = strings.ReplaceAll(line[i], "\x00", " ")
		}
		code := run(t.Context(), line, streams{in: strings.NewReader(""), out: &out, err: &err})
		if code != exitUsage || !strings.HasPrefix(err.String(), "fairlead: "+want) {
			t.Errorf("%q: exit code %d, %q, want %d and %q", args, code, err.String(), exitUsage, want)
		}
	}
	var out, err bytes.Buffer
	code := run(t.Context(), strings.Fields("register --dry-run --name a -p web=80 --unit b --node n -n shop -l app=a"),
		streams{in: strings.NewReader(""), out: &out, err: &err})
	for _, want := range []string{"kind: Pod", "name: a-n", "namespace: shop", "fairlead.dev/unit: b.service", "hostNetwork: true", "app: a"} {
		if code != exitDone || !strings.Contains(out.String(), want) {
			t.Errorf("exit code %d, %s: %s\nwant %q", code, err.String(), out.String(), want)
		}
	}
}

// The hook of a unit goes before the registration that knows of it, so that a failure can
// be repeated.
func TestHookGoesFirst(t *testing.T) {
	client := kubernetes.NewForConfigOrDie(apiservertest.Start(t))
	node := hostname()
	spec := registration.Spec{Name: "a", Namespace: "default", Node: node, Ports: []string{"80"}, Unit: "old"}
	pod, err := spec.Pod()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := registration.Write(t.Context(), client, pod); err != nil {
		t.Fatal(err)
	}
	var removed []string
	failure := errors.New("no systemd")
	remove := func(_ context.Context, unit string) (bool, error) {
		removed = append(removed, unit)
		return failure == nil, failure
	}
	if err := removeOldHook(t.Context(), client, pod, remove); err != nil || removed != nil {
		t.Errorf("the same unit again: %v, removed %q", err, removed)
	}
	spec.Unit = "new"
	if pod, err = spec.Pod(); err != nil {
		t.Fatal(err)
	}
	if err := removeOldHook(t.Context(), client, pod, remove); !errors.Is(err, failure) {
		t.Errorf("another unit: %v, want %v", err, failure)
	}
	if err := deregister(t.Context(), client, "default", "a", node, remove); !errors.Is(err, failure) {
		t.Errorf("deregister: %v, want %v", err, failure)
	}
	if _, err := client.CoreV1().Pods("default").Get(t.Context(), pod.Name, metav1.GetOptions{}); err != nil {
		t.Errorf("after a hook that is left: %v", err)
	}
	failure = nil
	if err := deregister(t.Context(), client, "default", "a", node, remove); err != nil {
		t.Error(err)
	}
	if want := []string{"old.service", "old.service", "old.service"}; !slices.Equal(removed, want) {
		t.Errorf("removed %q, want %q", removed, want)
	}
}
