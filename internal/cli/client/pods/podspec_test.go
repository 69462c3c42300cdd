package pods

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/fairlead/fairlead/internal/cli/base"
)

func TestRunBuildsThePod(t *testing.T) {
	f := podFlags{
		labels: "app=MyApp,tier=front", ports: []string{"http=9376", "53/udp"}, env: []string{"A=b=c"},
		ready: "http://:9376/healthz", workDir: "/srv", command: []string{"./server", "-v"},
	}
	got, err := f.pod()
	if err != nil {
		t.Fatal(err)
	}
	want := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "myapp-", Labels: map[string]string{"app": "MyApp", "tier": "front"}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "main", Image: "host", Command: []string{"./server", "-v"}, WorkingDir: "/srv",
			Env: []corev1.EnvVar{{Name: "A", Value: "b=c"}},
			Ports: []corev1.ContainerPort{
				{Name: "http", ContainerPort: 9376, Protocol: "TCP"},
				{ContainerPort: 53, Protocol: "UDP"},
			},
			ReadinessProbe: &corev1.Probe{
				ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/healthz", Port: intstr.FromInt32(9376), Scheme: "HTTP"}},
				PeriodSeconds: 1, TimeoutSeconds: 1, FailureThreshold: 1,
			},
		}}},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestRunRefusesBadFlags(t *testing.T) {
	for flag, change := range map[string]func(*podFlags){
		"--labels": func(f *podFlags) { f.labels = "app" },
		"--port":   func(f *podFlags) { f.ports = []string{"http=0"} },
		"--port ":  func(f *podFlags) { f.ports = []string{"9376/icmp"} },
		"the name": func(f *podFlags) { f.ports = []string{"HTTP_=80"} },
		"--env":    func(f *podFlags) { f.env = []string{"=x"} },
		"--ready":  func(f *podFlags) { f.ready = "http://host/" },
		"--ready ": func(f *podFlags) { f.ready = "ftp://:21" },
		"--name":   func(f *podFlags) { f.name = "Not_a_name" },
	} {
		f := podFlags{command: []string{"true"}}
		change(&f)
		_, err := f.pod()
		var usage base.UsageError
		if !errors.As(err, &usage) || !strings.Contains(err.Error(), strings.TrimSpace(flag)) {
			t.Errorf("%s: error %v, want one of usage that names the flag", flag, err)
		}
	}
}

func TestPodNamePrefix(t *testing.T) {
	for _, c := range []struct {
		f    podFlags
		want string
	}{
		{podFlags{command: []string{"/usr/bin/Python3.11"}}, "python3-11"},
		{podFlags{command: []string{"x"}, name: "web"}, "web"},
		{podFlags{command: []string{"__"}}, "run"},
		{podFlags{command: []string{strings.Repeat("a", 90)}}, strings.Repeat("a", 50)},
	} {
		if got, err := c.f.prefix(nil); got != c.want || err != nil {
			t.Errorf("prefix of %q is %q (%v), want %q", c.f.command, got, err, c.want)
		}
	}
}
