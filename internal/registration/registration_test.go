package registration_test

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/fairlead/fairlead/internal/registration"
	"github.com/fairlead/fairlead/internal/svc"
)

// What a file says, and each mistake with the file, the line and the field.
func TestParse(t *testing.T) {
	got, err := registration.Parse("a.yaml", "n.example", []byte(`
# redis of this machine
name: redis
labels: {app: redis, tier: "1"}
ports: [redis=6379, 6380]
unit: redis-server
---
---
name: dns
namespace: net
ports:
- dns=53/udp
ready: exec:dig @127.0.0.1
readyTimeout: 5s
address: 192.0.2.7
weight: 3
`))
	if err != nil {
		t.Fatal(err)
	}
	want := []registration.Spec{
		{Name: "redis", Node: "n.example", Labels: map[string]string{"app": "redis", "tier": "1"}, Ports: []string{"redis=6379", "6380"},
			Unit: "redis-server"},
		{Name: "dns", Namespace: "net", Node: "n.example", Ports: []string{"dns=53/udp"}, Ready: "exec:dig @127.0.0.1", ReadyTimeout: "5s",
			Address: "192.0.2.7", Weight: "3"},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	for want, text := range map[string]string{
		"a.yaml:2: port: no such field; want one of address, labels, name": "name: a\nport: 1",
		"a.yaml:3: ports: \"x=0\": the port 0 is not one of 1 to 65535":    "name: a\nlabels: {}\nports: [x=0]",
		"a.yaml:1: ports: want a list":                                     "ports: 80",
		"a.yaml:1: ports: on which port does it listen?":                   "name: a",
		"a.yaml:2: name: it is in line 1 as well":                          "name: a\nname: b\nports: [1]",
		"a.yaml:5: name: a is in line 1 as well":                           "name: a\nports: [1]\n---\n\nname: a\nports: [2]",
		"a.yaml:3: address: \"127.0.0.1\": other nodes cannot reach it":    "name: a\nports: [1]\naddress: 127.0.0.1",
		"a.yaml:3: address: \"169.254.169.254\": it is link-local":         "name: a\nports: [1]\naddress: 169.254.169.254",
		"a.yaml:4: pidFile: a program is known by its unit or":             "name: a\nports: [1]\nunit: a\npidFile: /run/a.pid",
		"a.yaml:3: pidFile: \"a.pid\": want an absolute path":              "name: a\nports: [1]\npidFile: a.pid",
		"a.yaml:3: weight: \"257\": want a number from 0 to 256":           "name: a\nports: [1]\nweight: 257",
		"a.yaml:3: unit: \"a/b.service\": want the name of a unit":         "name: a\nports: [1]\nunit: a/b.service",
		"a.yaml:1: name: \"A_b\": a lowercase RFC 1123 label":              "name: A_b\nports: [1]",
		"a.yaml:3: labels: ":                       "name: a\nports: [1]\nlabels: {'a b': c}",
		"a.yaml:3: ready: \"ftp://:1\": want http": "name: a\nports: [1]\nready: ftp://:1",
		"a.yaml:4: readyTimeout: \"1m1s\": want":   "name: a\nports: [1]\nready: tcp://:1\nreadyTimeout: 1m1s",
		"a.yaml:3: readyTimeout: \"1.5s\": want":   "name: a\nports: [1]\nreadyTimeout: 1.5s",
		"a.yaml:4: readyTimeout: there is no":      "name: a\nports: [1]\nunit: a\nreadyTimeout: 5s",
		"a.yaml:1: want the fields of a program":   "- name: a",
		"a.yaml:2: mapping values are not allowed": "name: a\n  b: c: d",
		"a.yaml:1: name: want a text":              "name:\nports: [1]",
	} {
		if _, err := registration.Parse("a.yaml", "n", []byte(text)); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func TestExample(t *testing.T) {
	const path = "../../examples/services.d/redis.yaml"
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if specs, err := registration.Parse(path, "n", data); err != nil || len(specs) != 2 {
		t.Errorf("%d programs, %v; want 2", len(specs), err)
	}
}

// Without a check, a unit or a file, a connection to the first TCP port decides.
func TestDefaultCheck(t *testing.T) {
	tcp := func(port int32) *corev1.Probe {
		return &corev1.Probe{
			ProbeHandler:  corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(port)}},
			PeriodSeconds: 1, TimeoutSeconds: 1, FailureThreshold: 1, SuccessThreshold: 1,
		}
	}
	for _, x := range []struct {
		change func(*registration.Spec)
		want   *corev1.Probe
	}{
		{func(*registration.Spec) {}, tcp(81)},
		{func(s *registration.Spec) { s.Address = "192.0.2.1" }, tcp(81)},
		{func(s *registration.Spec) { s.Ready = "tcp://:82" }, tcp(82)},
		{func(s *registration.Spec) { s.Unit, s.Ready = "a", "tcp://:82" }, tcp(82)},
		{func(s *registration.Spec) { s.Ready = "none" }, nil},
		{func(s *registration.Spec) { s.Unit = "a" }, nil},
		{func(s *registration.Spec) { s.PIDFile = "/a" }, nil},
		{func(s *registration.Spec) { s.Ports = []string{"80/udp"} }, nil},
	} {
		s := registration.Spec{Name: "a", Node: "n", Ports: []string{"80/udp", "81"}}
		x.change(&s)
		p, err := s.Pod()
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(x.want, p.Spec.Containers[0].ReadinessProbe); d != "" {
			t.Errorf("%+v: %s", s, d)
		}
	}
}

// A Pod of a Spec is valid. Fields that would mean a process, or hide that it has an
// address of the machine, make it invalid.
func TestValidate(t *testing.T) {
	for field, change := range map[string]func(*corev1.Pod){
		"":                           func(p *corev1.Pod) { p.Spec.SecurityContext = &corev1.PodSecurityContext{} }, // the API server's default
		"spec.hostNetwork: Required": func(p *corev1.Pod) { p.Spec.HostNetwork = false },
		"spec.nodeName: Required":    func(p *corev1.Pod) { p.Spec.NodeName = "" },
		"spec.containers: Forbidden": func(p *corev1.Pod) {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Image: "host"})
		},
		"spec.containers[0].command: Forbidden":       func(p *corev1.Pod) { p.Spec.Containers[0].Command = []string{"sh"} },
		"spec.containers[0].livenessProbe":            func(p *corev1.Pod) { p.Spec.Containers[0].LivenessProbe = &corev1.Probe{} },
		"spec.volumes: Forbidden":                     func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "v"}} },
		"metadata.annotations[fairlead.dev/address]":  func(p *corev1.Pod) { p.Annotations[svc.AddressAnnotation] = "127.0.0.1" },
		"metadata.annotations[fairlead.dev/weight]":   func(p *corev1.Pod) { p.Annotations[svc.WeightAnnotation] = "-1" },
		"metadata.annotations[fairlead.dev/unit]":     func(p *corev1.Pod) { p.Annotations[svc.UnitAnnotation] = "../x" },
		"metadata.annotations[fairlead.dev/pid-file]": func(p *corev1.Pod) { p.Annotations[svc.PIDFileAnnotation] = "/a/../b" },
		"spec.initContainers[0].image: Invalid": func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Image: svc.RegisteredImage}}
		},
		"spec.activeDeadlineSeconds": func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = new(int64) },
		"spec.securityContext":       func(p *corev1.Pod) { p.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: new(int64)} },
		"spec.containers[0].securityContext": func(p *corev1.Pod) {
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: new(bool)}
		},
		"spec.containers[0].resources": func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceCPU: {}}
		},
		"spec.containers[0].workingDir": func(p *corev1.Pod) { p.Spec.Containers[0].WorkingDir = "/" },
		"spec.containers[0].stdin":      func(p *corev1.Pod) { p.Spec.Containers[0].Stdin = true },
		"spec.containers[0].tty":        func(p *corev1.Pod) { p.Spec.Containers[0].TTY = true },
		"spec.containers[0].lifecycle":  func(p *corev1.Pod) { p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{} },
		"spec.containers[0].env":        func(p *corev1.Pod) { p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "A"}} },
	} {
		p := example(t)
		change(p)
		errs := registration.Validate(p)
		if got := errs.ToAggregate(); (field == "") != (got == nil) || got != nil && !strings.Contains(got.Error(), field) {
			t.Errorf("%q: %v", field, got)
		}
	}
}

func example(t *testing.T) *corev1.Pod {
	t.Helper()
	p, err := (&registration.Spec{Name: "a", Node: "n.example", Ports: []string{"80"}, Unit: "a"}).Pod()
	if err != nil {
		t.Fatal(err)
	}
	if p.Name != "a-n-example" {
		t.Errorf("its name is %s", p.Name)
	}
	return p
}

// Who may register was decided when the Pod was created: no update makes a registration of
// another Pod, or changes where it leads.
func TestValidateUpdate(t *testing.T) {
	other := func(p *corev1.Pod) { p.Spec.Containers[0].Image = "host" }
	none := func(*corev1.Pod) {}
	address := func(p *corev1.Pod) { p.Annotations[svc.AddressAnnotation] = "192.0.2.1" }
	weight := func(p *corev1.Pod) { p.Annotations[svc.WeightAnnotation] = "3" }
	labels := func(p *corev1.Pod) { p.Labels = map[string]string{"a": "b"} }
	for _, x := range []struct {
		before, after func(*corev1.Pod)
		ok            bool
	}{
		{none, labels, true}, {none, weight, true}, {none, none, true}, {other, func(p *corev1.Pod) { other(p); address(p) }, true},
		{none, other, false}, {other, none, false}, {none, address, false}, {address, none, false},
	} {
		before, after := example(t), example(t)
		before.ObjectMeta.CreationTimestamp = metav1.Now()
		x.before(before)
		x.after(after)
		if errs := registration.ValidateUpdate(after, before); (len(errs) == 0) != x.ok {
			t.Errorf("%v, want accepted: %v", errs, x.ok)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("name: a\nports: [redis=6379]\nlabels: {a: b}\nready: tcp://:1"))
	f.Add([]byte("a: &a [*a]"))
	f.Fuzz(func(t *testing.T, data []byte) {
		specs, err := registration.Parse("f", "n", data)
		if err != nil && !strings.HasPrefix(err.Error(), "f:") {
			t.Errorf("an error without the file: %v", err)
		}
		for _, s := range specs {
			p, err := s.Pod()
			if err != nil {
				t.Fatal(err)
			}
			if errs := registration.Validate(p); len(errs) > 0 {
				t.Errorf("an invalid Pod: %v", errs)
			}
		}
	})
}

// A file that a Spec writes is read as that Spec.
func TestDocument(t *testing.T) {
	want := registration.Spec{
		Name: "redis", Namespace: "shop", Node: "n", Labels: map[string]string{"app": "redis", "version": "1.0", "on": "true"},
		Ports: []string{"redis=6379", "80"}, Ready: "exec:test -e '/x: y'", PIDFile: "/run/redis.pid", Address: "192.0.2.1", Weight: "5",
	}
	text, err := want.Document()
	if err != nil {
		t.Fatal(err)
	}
	got, err := registration.Parse("f", "n", text)
	if err != nil || len(got) != 1 || !reflect.DeepEqual(got[0], want) {
		t.Errorf("%s\n%+v, %v, want %+v", text, got, err, want)
	}
}
