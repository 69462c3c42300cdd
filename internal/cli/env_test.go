package cli

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver"
	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// behaviours 68 to 72: what 'fairlead env' prints, with the example of the documents
// and their address, from a real API server.
func TestEnv(t *testing.T) {
	server := apiservertest.StartServer(t, func(o *apiserver.Options) {
		o.ServiceCIDRs = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}
	})
	client := kubernetes.NewForConfigOrDie(server.LoopbackConfig())
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	service := func(ns, name, ip string, ports ...corev1.ServicePort) {
		t.Helper()
		_, err := client.CoreV1().Services(ns).Create(ctx, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{ClusterIP: ip, Ports: ports},
		}, metav1.CreateOptions{})
		must(err)
	}
	_, err := client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, metav1.CreateOptions{})
	must(err)
	service("shop", "redis-master", "10.0.0.11", corev1.ServicePort{Port: 6379})
	service("shop", "headless", "None", corev1.ServicePort{Port: 80})
	service("default", "elsewhere", "10.0.0.12", corev1.ServicePort{Port: 80})
	no := false
	for name, links := range map[string]*bool{"with": nil, "without": &no} {
		_, err := client.CoreV1().Pods("shop").Create(ctx, &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Spec:       corev1.PodSpec{EnableServiceLinks: links, Containers: []corev1.Container{{Name: "main", Image: "host"}}},
		}, metav1.CreateOptions{})
		must(err)
	}
	const master = `KUBERNETES_PORT=tcp://10.0.0.1:443
KUBERNETES_PORT_443_TCP=tcp://10.0.0.1:443
KUBERNETES_PORT_443_TCP_ADDR=10.0.0.1
KUBERNETES_PORT_443_TCP_PORT=443
KUBERNETES_PORT_443_TCP_PROTO=tcp
KUBERNETES_SERVICE_HOST=10.0.0.1
KUBERNETES_SERVICE_PORT=443
KUBERNETES_SERVICE_PORT_HTTPS=443
`
	const redis = `REDIS_MASTER_PORT=tcp://10.0.0.11:6379
REDIS_MASTER_PORT_6379_TCP=tcp://10.0.0.11:6379
REDIS_MASTER_PORT_6379_TCP_ADDR=10.0.0.11
REDIS_MASTER_PORT_6379_TCP_PORT=6379
REDIS_MASTER_PORT_6379_TCP_PROTO=tcp
REDIS_MASTER_SERVICE_HOST=10.0.0.11
REDIS_MASTER_SERVICE_PORT=6379
`
	for _, c := range []struct{ args, want string }{
		{"-n shop", master + redis},
		{"-n shop --pod with", master + redis},
		{"-n shop --pod without", master},
		{"-n nowhere", ""},
	} {
		code, out, stderr := call(t, append([]string{"env", "--kubeconfig", server.Kubeconfig()}, strings.Fields(c.args)...)...)
		if c.want == "" { // a namespace that is not there
			if code != exitFailed || !strings.Contains(stderr, "not found") {
				t.Errorf("env %s: exit code %d, %q", c.args, code, stderr)
			}
			continue
		}
		if d := cmp.Diff(c.want, out); code != exitDone || d != "" {
			t.Errorf("env %s: exit code %d, %s\n%s", c.args, code, stderr, d)
		}
	}
	if code, _, stderr := call(t, "env", "--kubeconfig", server.Kubeconfig(), "-n", "shop", "--pod", "none"); code != exitFailed ||
		!strings.Contains(stderr, `"none" not found`) {
		t.Errorf("a Pod that is not there: exit code %d, %q", code, stderr)
	}
}
