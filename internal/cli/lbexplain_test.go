package cli

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

const manyClouds = `
apiVersion: v1
kind: ConfigMap
metadata: {name: other}
---
apiVersion: v1
kind: Service
metadata:
  name: web
  annotations:
    service.beta.kubernetes.io/aws-load-balancer-ssl-cert: arn:aws:acm:us-east-1:123456789012:certificate/web-cert
    service.beta.kubernetes.io/aws-load-balancer-ssl-ports: https
    service.beta.kubernetes.io/aws-load-balancer-healthcheck-healthy-threshold: ""
    service.beta.kubernetes.io/aws-load-balancer-healthcheck-interval: "3"
    service.beta.kubernetes.io/aws-load-balancer-extra-security-groups: sg-1
    service.beta.kubernetes.io/aws-load-balancer-internal: 0.0.0.0/0
    service.beta.kubernetes.io/aws-load-balancer-proxy-protocol-per-target-group: "80"
    service.beta.kubernetes.io/aws-load-balancer-ssl-port: "443"
spec:
  type: LoadBalancer
  ports: [{name: http, port: 80}, {name: https, port: 443}]
`

// 'fairlead lb explain' needs no cluster for a file, and tells the same of a Service of one.
func TestExplain(t *testing.T) {
	file := filepath.Join(t.TempDir(), "service.yaml")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(manyClouds)
	code, out, stderr := call(t, "lb", "explain", "-f", file)
	if code != exitDone {
		t.Fatalf("exit %d: %s", code, stderr)
	}
	for _, want := range []string{
		"443   https  tls       tcp", "web-cert", "is service.beta.kubernetes.io/aws-load-balancer-ssl-ports meant?",
		`"3" is not a number from 5 to 300 seconds`,
		"accepted; has no meaning here because", "the PROXY protocol is for all ports or none", "empty: the default",
		"internal true",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	code, out, stderr = call(t, "lb", "explain", "-f", file, "-o", "json")
	var parsed struct {
		Services []struct {
			Name string `json:"name"`
			Spec struct {
				Health struct {
					Interval string `json:"interval"`
				} `json:"health"`
			} `json:"spec"`
			Findings []struct{ State, Annotation, Text string } `json:"findings"`
		} `json:"services"`
	}
	if err := json.Unmarshal([]byte(out), &parsed); code != exitDone || err != nil || len(parsed.Services) != 1 ||
		parsed.Services[0].Spec.Health.Interval != "10s" || len(parsed.Services[0].Findings) < 8 {
		t.Errorf("exit %d, %v: %s%s", code, err, out, stderr)
	}
	write("{kind: Service, apiVersion: v1, metadata: {name: internal}}\n---\n" + manyClouds)
	if code, out, stderr := call(t, "lb", "explain", "-f", file); code != exitDone || strings.Contains(out, "internal\n") {
		t.Errorf("beside another Service: exit %d: %s%s", code, out, stderr)
	}
	for text, want := range map[string]string{
		"kind: ConfigMap":                                           "there is no Service in it",
		strings.Replace(manyClouds, `"3"`, "3", 1):                  "write them in quotes",
		strings.Replace(manyClouds, "LoadBalancer", "ClusterIP", 1): "is of type ClusterIP, not LoadBalancer",
		"a: b: c": file,
	} {
		write(text)
		if code, _, stderr := call(t, "lb", "explain", "-f", file); code == exitDone || !strings.Contains(stderr, want) {
			t.Errorf("exit %d: %s, want %q", code, stderr, want)
		}
	}
	for _, args := range [][]string{{"lb", "explain"}, {"lb", "explain", "web", "-f", file}, {"lb", "explain", "a", "b"}} {
		if code, _, stderr := call(t, args...); code != exitUsage || !strings.Contains(stderr, "takes one Service, or -f FILE") {
			t.Errorf("%q: exit %d: %s", args, code, stderr)
		}
	}
}

func TestExplainOfACluster(t *testing.T) {
	server := apiservertest.StartServer(t)
	client := kubernetes.NewForConfigOrDie(server.LoopbackConfig())
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web", Annotations: map[string]string{"metallb.io/address-pol": "a"}}}
	s.Spec.Type, s.Spec.Ports = corev1.ServiceTypeLoadBalancer, []corev1.ServicePort{{Port: 80}}
	if _, err := client.CoreV1().Services("default").Create(context.Background(), s, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"web", "default/web"} {
		code, out, stderr := call(t, "lb", "explain", name, "--kubeconfig", server.Kubeconfig())
		if code != exitDone || !strings.Contains(out, "Service default/web takes the direct way") ||
			!strings.Contains(out, "is metallb.io/address-pool meant?") {
			t.Errorf("exit %d: %s%s", code, out, stderr)
		}
	}
}
