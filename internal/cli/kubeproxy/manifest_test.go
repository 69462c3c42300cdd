package kubeproxy

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/fairlead/fairlead/internal/proxy"
	"github.com/fairlead/fairlead/internal/table"
)

// manifest returns the objects of deploy/kubernetes/proxy.yaml, read strictly.
func manifest(t *testing.T) (out []runtime.Object) {
	t.Helper()
	text, err := os.ReadFile("../../../deploy/kubernetes/proxy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	docs := yaml.NewDocumentDecoder(io.NopCloser(bytes.NewReader(text)))
	strict := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	for buf := make([]byte, len(text)); ; {
		n, err := docs.Read(buf)
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		o, _, err := strict.Decode(buf[:n], nil, nil)
		if err != nil {
			t.Fatalf("%v in\n%s", err, buf[:n])
		}
		out = append(out, o)
	}
}

// idle is a dataplane that writes nothing, since this is about requests to the API.
type idle struct{}

func (idle) Apply(context.Context, *table.Table, []table.Key) error { return nil }
func (idle) Dump(context.Context) (string, error)                   { return "", nil }
func (idle) Close() error                                           { return nil }

// The manifest's role allows what the proxy asks for, and no more.
func TestManifestAllowsWhatTheProxyAsks(t *testing.T) {
	allowed := map[string]bool{}
	for _, o := range manifest(t) {
		if role, ok := o.(*rbacv1.ClusterRole); ok {
			for _, r := range role.Rules {
				for _, v := range r.Verbs {
					for _, what := range r.Resources {
						allowed[v+" "+what+"."+r.APIGroups[0]] = true
					}
				}
			}
		}
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0") // so that the proxy has an Event to record
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	client := fake.NewClientset()
	if _, err := findNode(t.Context(), client, "here", nil); err != nil {
		t.Fatal(err)
	}
	p, err := proxy.New(proxy.Options{
		Client: client, NodeName: "here", Dataplane: idle{}, MetricsAddress: taken.Addr().String(), Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	// An Event that comes again is patched; the rest is asked for in any case.
	want := map[string]bool{"patch events.": true}
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	for ctx.Err() == nil && !maps.Equal(want, allowed) {
		for _, a := range client.Actions() {
			asked := a.GetVerb() + " " + a.GetResource().Resource + "." + a.GetResource().Group
			if want[asked] = true; !allowed[asked] {
				t.Errorf("the manifest does not allow to %s", asked)
				stop()
			}
		}
		<-look.C
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	for what := range allowed {
		if !want[what] {
			t.Errorf("the proxy never asks to %s", what)
		}
	}
}

// The Pod has no privilege but NET_ADMIN, writes to no file, and is asked whether it works.
func TestManifestIsUnprivileged(t *testing.T) {
	for _, o := range manifest(t) {
		d, ok := o.(*appsv1.DaemonSet)
		if !ok {
			continue
		}
		pod := d.Spec.Template.Spec
		c := pod.Containers[0]
		sc := c.SecurityContext
		if sc.Privileged != nil || !*sc.ReadOnlyRootFilesystem || *sc.AllowPrivilegeEscalation || len(sc.Capabilities.Add) != 1 ||
			sc.Capabilities.Add[0] != "NET_ADMIN" || sc.Capabilities.Drop[0] != "ALL" || pod.HostPID || pod.HostIPC {
			t.Errorf("the security context is %+v", sc)
		}
		if pod.SecurityContext.SeccompProfile.Type != "RuntimeDefault" || pod.PriorityClassName != "system-node-critical" {
			t.Errorf("the Pod has %+v, %s", pod.SecurityContext, pod.PriorityClassName)
		}
		if c.LivenessProbe == nil || c.ReadinessProbe == nil || c.StartupProbe == nil {
			t.Error("a probe is missing")
		}
		if !slices.ContainsFunc(c.Args, func(a string) bool { return strings.HasPrefix(a, "--config=") }) {
			t.Errorf("the arguments are %v", c.Args)
		}
		return
	}
	t.Error("there is no DaemonSet")
}
