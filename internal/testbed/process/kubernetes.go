package process

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/fairlead/fairlead/internal/apiserver/pki"
	"github.com/fairlead/fairlead/internal/testbed"
)

// kubernetesEnv names the directory with etcd, kube-apiserver, kube-controller-manager and kube-scheduler, as 'make kubernetes-test'
// builds them. Where it is set, StartAPI starts these in the place of fairlead's API server.
const kubernetesEnv = "FAIRLEAD_KUBERNETES"

// Kubernetes reports whether StartAPI starts the real control plane of Kubernetes.
func Kubernetes() bool { return os.Getenv(kubernetesEnv) != "" }

// endpointControllers are what 'fairlead controllers' is in the place of.
const endpointControllers = "endpoints-controller,endpointslice-controller,endpointslice-mirroring-controller"

// RunWorkloads runs until the test ends what makes Pods of Deployments and DaemonSets, gives them nodes, and keeps EndpointSlices: the
// real kube-controller-manager and kube-scheduler beside a real kube-apiserver, 'fairlead controllers' beside fairlead's own.
func (s *Server) RunWorkloads(t testing.TB) {
	t.Helper()
	if s.plane == nil {
		Start(t, exec.Command(Program("fairlead"), "controllers", "--kubeconfig", s.Kubeconfig, "--controllers",
			"daemonset,scheduler,garbage,deployment,replicaset,endpointslice"))
		return
	}
	s.plane.controllers(t, endpointControllers+",daemonset-controller,deployment-controller,replicaset-controller")
	s.plane.begin(t, "kube-scheduler", "--kubeconfig", s.plane.kubeconfig(t, "system:kube-scheduler"),
		"--bind-address", "127.0.0.1", "--secure-port", "0", "--leader-elect=false")
}

// controlPlane is the real control plane, configured as kubeadm does it. It listens on loopback only.
type controlPlane struct {
	programs, dir, url string
	certs              *pki.Directory
}

// startKubernetes runs etcd, kube-apiserver, and all controllers except the ones that RunWorkloads or 'fairlead controllers' runs.
func startKubernetes(t testing.TB, programs string) *Server {
	t.Helper()
	k := &controlPlane{programs: programs, dir: t.TempDir(), url: "https://127.0.0.1:" + strconv.Itoa(FreePort(t))}
	store, peer := fmt.Sprintf("http://127.0.0.1:%d", FreePort(t)), fmt.Sprintf("http://127.0.0.1:%d", FreePort(t))
	k.begin(t, "etcd", "--data-dir", filepath.Join(k.dir, "etcd"), "--log-level", "warn", "--unsafe-no-fsync",
		"--listen-client-urls", store, "--advertise-client-urls", store,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer)
	args := k.flags(t, store)
	s := &Server{plane: k, Kubeconfig: k.kubeconfig(t, "kubernetes-admin", "system:masters")}
	s.command = func() *exec.Cmd { return exec.Command(k.program("kube-apiserver"), args...) }
	s.Start(t)
	s.awaitAPI(t)
	k.controllers(t, "*,-endpoints-controller,-endpointslice-controller,-endpointslice-mirroring-controller,"+
		"-daemonset-controller,-deployment-controller,-replicaset-controller")
	testbed.Until(t, "the accounts of the first namespaces", func() error { // without which no Pod is admitted
		_, err1 := s.Client.CoreV1().ServiceAccounts("default").Get(t.Context(), "default", metav1.GetOptions{})
		_, err2 := s.Client.CoreV1().ServiceAccounts("kube-system").Get(t.Context(), "default", metav1.GetOptions{})
		return errors.Join(err1, err2)
	})
	return s
}

// flags makes the certificates and keys of kube-apiserver, and returns its command line.
func (k *controlPlane) flags(t testing.TB, store string) []string {
	t.Helper()
	front, err1 := pki.Open(filepath.Join(k.dir, "front-proxy"), time.Now)
	certs, err2 := pki.Open(filepath.Join(k.dir, "pki"), time.Now)
	key, _, err3 := pki.NewKey()
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	der, err1 := x509.MarshalECPrivateKey(key) // the form that kube-apiserver also takes for the public key
	text := pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})
	if err := errors.Join(err1, os.WriteFile(k.file("sa.key"), text, 0o600)); err != nil {
		t.Fatal(err)
	}
	k.certs = certs
	serving, err1 := certs.Ensure(pki.Leaf{
		Name: "apiserver", CommonName: "kube-apiserver", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"kubernetes.default.svc"},
	})
	client, err2 := front.Ensure(pki.Leaf{Name: "front-proxy-client", CommonName: "front-proxy-client"})
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	_, port, err1 := net.SplitHostPort(k.url[len("https://"):])
	if err := errors.Join(err1, k.write("apiserver", serving), k.write("front-proxy-client", client)); err != nil {
		t.Fatal(err)
	}
	return []string{
		"--etcd-servers", store, "--bind-address", "127.0.0.1", "--secure-port", port,
		"--advertise-address", "198.18.0.1", "--endpoint-reconciler-type", "none", // which nothing here connects to
		"--allow-privileged", "--authorization-mode", "Node,RBAC",
		"--enable-admission-plugins", "NodeRestriction,OwnerReferencesPermissionEnforcement", // the second as OpenShift has it
		"--enable-bootstrap-token-auth", "--client-ca-file", filepath.Join(k.dir, "pki", "ca.crt"),
		"--tls-cert-file", k.file("apiserver.crt"), "--tls-private-key-file", k.file("apiserver.key"),
		"--requestheader-client-ca-file", filepath.Join(k.dir, "front-proxy", "ca.crt"), "--requestheader-allowed-names", "front-proxy-client",
		"--requestheader-extra-headers-prefix", "X-Remote-Extra-", "--requestheader-group-headers", "X-Remote-Group",
		"--requestheader-username-headers", "X-Remote-User",
		"--proxy-client-cert-file", k.file("front-proxy-client.crt"), "--proxy-client-key-file", k.file("front-proxy-client.key"),
		"--service-account-issuer", "https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file", k.file("sa.key"), "--service-account-signing-key-file", k.file("sa.key"),
		"--service-cluster-ip-range", "10.96.0.0/16,fd00:10:96::/112",
	}
}

// controllers runs a kube-controller-manager.
func (k *controlPlane) controllers(t testing.TB, names string) {
	t.Helper()
	k.begin(t, "kube-controller-manager", "--kubeconfig", k.kubeconfig(t, "system:kube-controller-manager"),
		"--bind-address", "127.0.0.1", "--secure-port", "0", "--leader-elect=false", "--controllers", names,
		"--use-service-account-credentials", "--service-account-private-key-file", k.file("sa.key"),
		"--root-ca-file", filepath.Join(k.dir, "pki", "ca.crt"))
}

// kubeconfig writes a kubeconfig for a user of some groups, and returns the file's name.
func (k *controlPlane) kubeconfig(t testing.TB, user string, groups ...string) string {
	t.Helper()
	p, err := k.certs.Ensure(pki.Leaf{Name: user, CommonName: user, Groups: groups})
	if err != nil {
		t.Fatal(err)
	}
	c := clientcmdapi.NewConfig()
	c.Clusters["c"] = &clientcmdapi.Cluster{Server: k.url, CertificateAuthorityData: k.certs.AuthoritiesPEM()}
	c.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: p.Cert, ClientKeyData: p.Key}
	c.Contexts["x"], c.CurrentContext = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}, "x"
	file := k.file(user + ".kubeconfig")
	if err := clientcmd.WriteToFile(*c, file); err != nil {
		t.Fatal(err)
	}
	return file
}

// begin runs a program until the test ends. Not all of them end with 0 after SIGTERM.
func (k *controlPlane) begin(t testing.TB, name string, args ...string) {
	t.Helper()
	p, err := Begin(t, filepath.Join(t.TempDir(), "log"), exec.Command(k.program(name), args...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if p.Ended() {
			t.Errorf("%s has ended by itself", name)
		}
		p.End()
		if t.Failed() {
			log := p.Log()
			t.Logf("the end of the log of %s:\n%s", p, log[max(0, len(log)-shownLog):])
		}
	})
}

// shownLog is how many bytes of a program's log are shown when a test fails: the programs write much.
const shownLog = 10_000

func (k *controlPlane) program(name string) string { return filepath.Join(k.programs, name) }

func (k *controlPlane) file(name string) string { return filepath.Join(k.dir, name) }

func (k *controlPlane) write(name string, p *pki.Pair) error {
	return errors.Join(os.WriteFile(k.file(name+".crt"), p.Cert, 0o600), os.WriteFile(k.file(name+".key"), p.Key, 0o600))
}
