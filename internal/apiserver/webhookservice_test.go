package apiserver_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/fairlead/fairlead/internal/apiserver/apiservertest"
)

// hookNetEnv is set in a process that has its own network namespace.
const hookNetEnv = "FAIRLEAD_TEST_HOOK_NETWORK"

// A webhook of a Service without ClusterIP is reached at its endpoint, and shows the
// certificate of the Service's name. The endpoint is an address of the machine that
// Endpoints may have, in a network namespace in which there is nothing else.
func TestWebhookOfAService(t *testing.T) {
	t.Parallel()
	const own = "192.0.2.1"
	if os.Getenv(hookNetEnv) == "" {
		inNamespace(t, "ip link set lo up && ip address add "+own+"/32 dev lo", hookNetEnv+"=1")
		return
	}
	cfg := apiservertest.Start(t)
	ctx, cancel := context.WithTimeout(t.Context(), 4*waitTimeout)
	defer cancel()
	h := hookTest{api{t, ctx, cfg, kubernetes.NewForConfigOrDie(cfg), "default"}, newReviewer(t)}
	l, err := net.Listen("tcp", net.JoinHostPort(own, "0"))
	h.must(err)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	h.must(err)
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"hook." + h.ns + ".svc"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	h.must(err)
	server := &http.Server{Handler: h.Config.Handler, ReadHeaderTimeout: waitTimeout, ErrorLog: log.New(io.Discard, "", 0),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}}
	go func() { _ = server.ServeTLS(l, "", "") }()
	h.Cleanup(func() { server.Close() })
	_, err = h.client.CoreV1().Services(h.ns).Create(h.ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "hook"},
		Spec: corev1.ServiceSpec{ClusterIP: corev1.ClusterIPNone, Ports: []corev1.ServicePort{{Port: 443}}}}, metav1.CreateOptions{})
	h.must(err)
	_, err = h.client.DiscoveryV1().EndpointSlices(h.ns).Create(h.ctx, &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "hook", Labels: map[string]string{discoveryv1.LabelServiceName: "hook"}},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{own}}},
		Ports: []discoveryv1.EndpointPort{{Port: new(int32(l.Addr().(*net.TCPAddr).Port))}},
	}, metav1.CreateOptions{})
	h.must(err)
	h.validating("", func(w *admissionv1.ValidatingWebhook) {
		w.ClientConfig = admissionv1.WebhookClientConfig{
			Service:  &admissionv1.ServiceReference{Namespace: h.ns, Name: "hook", Path: new("/reject")},
			CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		}
	})
	h.rejected("not today")
}

// inNamespace runs the test in a process with its own network namespace, after the
// commands of setup and with a variable of the environment set.
func inNamespace(t *testing.T, setup, variable string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("makes a network namespace, which needs root")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*waitTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "unshare", "-n", "sh", "-c", setup+` && exec "$0" -test.run "^$1\$" -test.count 1`, os.Args[0], t.Name())
	cmd.Env = append(os.Environ(), variable)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // the signal comes with the end of the thread
	defer runtime.UnlockOSThread()
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "PASS") {
		t.Errorf("%v\n%s", err, out)
	}
}
