package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
	"github.com/fairlead/fairlead/internal/cli/base"
	"github.com/fairlead/fairlead/internal/lb/proxied/lbtest"
)

// A plan tells which certificate a listener would serve, which addresses would be in no pool any more, and what a deletion would do, and
// changes nothing. An object of a kind that the server does not serve is an error, as kubectl has one.
func TestPlanOfLoadBalancers(t *testing.T) {
	server := apiservertest.StartServer(t)
	client := kubernetes.NewForConfigOrDie(server.LoopbackConfig())
	ctx := t.Context()
	done := make(chan int, 1)
	go func() {
		var out strings.Builder
		done <- run(ctx, []string{"lb", "--kubeconfig", server.Kubeconfig(), "--node-name", "n", "--speaker=false", "--lb-pool", "a=192.0.2.0/31",
			"--metrics-bind-address", "", "--log-level", "error"}, base.Streams{In: strings.NewReader(""), Out: &out, Err: &out})
	}()
	t.Cleanup(func() { <-done })
	web := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web", Annotations: map[string]string{
		"fairlead.dev/lb-protocol": "https", "fairlead.dev/lb-tls-secrets": "web-tls"}},
		Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: []corev1.ServicePort{{Port: 443}}}}
	if _, err := client.CoreV1().Services("default").Create(ctx, web, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	address := ""
	until(t, func() error {
		s, err := client.CoreV1().Services("default").Get(ctx, "web", metav1.GetOptions{})
		if err != nil || len(s.Status.LoadBalancer.Ingress) == 0 {
			return fmt.Errorf("no address yet: %w", err)
		}
		address = s.Status.LoadBalancer.Ingress[0].IP
		return nil
	})
	file := filepath.Join(t.TempDir(), "plan.yaml")
	plan := func(manifest string, want int, texts ...string) {
		t.Helper()
		args := []string{"plan", "-f", file, "--kubeconfig", server.Kubeconfig()}
		if rest, remove := strings.CutPrefix(manifest, "delete "); remove {
			manifest, args = rest, append(args, "--delete")
		}
		if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
			t.Fatal(err)
		}
		code, out, stderr := call(t, args...)
		if code != want {
			t.Errorf("exit %d, want %d: %s%s", code, want, out, stderr)
		}
		for _, text := range texts {
			if !strings.Contains(out+stderr, text) {
				t.Errorf("no %q in\n%s%s", text, out, stderr)
			}
		}
	}
	secret := func(name string) string {
		_, cert, key := lbtest.Certificate(t, name)
		return fmt.Sprintf("{apiVersion: v1, kind: Secret, type: kubernetes.io/tls, metadata: {name: web-tls}, "+
			"stringData: {tls.crt: %q, tls.key: %q}}", cert, key)
	}
	plan(secret("one.example"), 0, "Secret default/web-tls: created", "Service default/web\n",
		"listener https on port 443 serves the certificate of Secret default/web-tls: for one.example (ends ")
	_, cert, key := lbtest.Certificate(t, "one.example")
	if _, err := client.CoreV1().Secrets("default").Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "web-tls"},
		Type: corev1.SecretTypeTLS, Data: map[string][]byte{"tls.crt": cert, "tls.key": key}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	plan(secret("two.example"), 0, "serves another certificate: for two.example (ends ", "in place of for one.example")
	wrong := fmt.Sprintf("{apiVersion: v1, kind: Secret, metadata: {name: web-tls}, type: kubernetes.io/tls, stringData: {tls.crt: %q}}",
		strings.Replace(string(cert), "BEGIN", "BEGIM", 1))
	plan(wrong, 0, "keeps its last certificate", "tls.crt and tls.key are not a certificate and its key")
	plan("delete "+secret("x"), 0, "Secret default/web-tls: deleted", "Secret default/web-tls: it does not exist")

	const pools = `{apiVersion: fairlead.dev/v1, kind: IPAddressPool, metadata: {name: a}, spec: {addresses: [198.51.100.0/24]}}`
	plan(pools, 0, "IPAddressPool a: changed", "Service default/web\n",
		"its address "+address+" is in no pool any more: the Service keeps it, with the Warning AddressOutsidePools")
	plan("delete "+pools, 0, "IPAddressPool a: deleted", "its address "+address+" is in no pool any more")

	service := "{apiVersion: v1, kind: Service, metadata: {name: web}}"
	plan("delete "+service, 2, "Service default/web: deleted", "the load balancer's address "+address+" is given back",
		"DNS: web.default.svc.cluster.local no longer resolves")
	plan("delete {apiVersion: v1, kind: Service, metadata: {name: nothing}}", 0, "Service default/nothing: does not exist",
		"nothing changes for Services")

	const set = `{apiVersion: apps/v1, kind: StatefulSet, metadata: {name: db}, spec: {serviceName: db}}`
	plan(set, exitFailed, "StatefulSet default/db: not served",
		"StatefulSet default/db: the API server does not serve this kind, so that kubectl fails (docs/compatibility.md")
	plan(`{apiVersion: v1, kind: ServiceAccount, metadata: {name: c}}`, 0, "ServiceAccount default/c: not looked at")
	s, err := client.CoreV1().Secrets("default").Get(ctx, "web-tls", metav1.GetOptions{})
	if err != nil || string(s.Data["tls.crt"]) != string(cert) {
		t.Errorf("a plan has changed the Secret: %v", err)
	}
}
