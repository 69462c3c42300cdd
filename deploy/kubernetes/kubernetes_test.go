package kubernetes

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	authv1 "k8s.io/api/authentication/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

func TestMain(m *testing.M) {
	process.Main(func() int { return testbed.Run(m) }, "fairlead", "apiserver", "kubectl")
}

// size is the size of a test that an environment variable may set, as 'make migrate-test' does.
func size(t *testing.T, variable string, otherwise int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s is %q; want a number, at least 1", variable, text)
	}
	return n
}

// rig is a cluster on which the manifests are applied, and nodes that run their containers' commands.
type rig struct {
	*testing.T
	api     *process.Server
	client  *kubernetes.Clientset // of an administrator
	node    *testbed.Host
	node2   *testbed.Host    // for node-local DNS, which uses the same port as the server in the place of CoreDNS
	gateway *httptest.Server // the API server for programs of the node

	// beforeRemoval, if there is one, is called before a Pod whose process has ended is removed.
	beforeRemoval func(pod *corev1.Pod)

	requests requests // of the node's programs

	mu       sync.Mutex
	rejected []string // requests that the API server answered with 401 or 403
	// podLog, if there is one, returns what a Pod has written. It is in the place of the kubelet's own port, which the API server asks.
	podLog func(namespace, name string) (text string, ok bool)
}

func newRig(t *testing.T) *rig {
	t.Helper()
	network := testbed.NewNetwork(t)
	r := &rig{T: t, node: network.Host("node1"), node2: network.Host("node2")}
	r.connect()
	return r
}

// connect starts the API server, and makes the gateway of the node.
func (r *rig) connect() {
	r.Helper()
	r.api = process.StartAPI(r.T)
	r.client = r.api.Client
	r.serveGateway()
}

// serveGateway passes requests of the node's programs on to the API server, and notes which it rejects.
func (r *rig) serveGateway() {
	r.Helper()
	target, err1 := url.Parse(r.api.Config.Host)
	anonymous := rest.AnonymousClientConfig(r.api.Config)
	transport, err2 := rest.TransportFor(anonymous)
	if err1 != nil || err2 != nil {
		r.Fatal(err1, err2)
	}
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.Transport, proxy.FlushInterval = transport, -1
	proxy.ModifyResponse = func(res *http.Response) error {
		if res.StatusCode == http.StatusUnauthorized || res.StatusCode == http.StatusForbidden {
			body, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
			res.Body = io.NopCloser(bytes.NewReader(body))
			if err == nil && bytes.Contains(body, []byte(unknownKind)) {
				return nil
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			r.rejected = append(r.rejected, fmt.Sprintf("%s %s: %s", res.Request.Method, res.Request.URL.Path, res.Status))
		}
		return nil
	}
	var listener net.Listener
	r.node.Do(func() {
		listener, err1 = net.Listen("tcp", net.JoinHostPort(r.node.Addr4().String(), "6443"))
	})
	if err1 != nil {
		r.Fatal(err1)
	}
	r.gateway = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.requests.note(req)
		r.mu.Lock()
		podLog := r.podLog
		r.mu.Unlock()
		if m := podLogPath.FindStringSubmatch(req.URL.Path); m != nil && podLog != nil {
			if text, ok := podLog(m[1], m[2]); ok {
				_, _ = io.WriteString(w, text)
				return
			}
		}
		proxy.ServeHTTP(w, req)
	}))
	_ = r.gateway.Listener.Close()
	r.gateway.Listener, r.gateway.EnableHTTP2 = listener, true
	r.gateway.StartTLS()
	r.Cleanup(func() {
		r.gateway.CloseClientConnections()
		r.gateway.Close()
	})
}

// podLogPath is where the log of a Pod is.
var podLogPath = regexp.MustCompile(`^/api/v1/namespaces/([^/]+)/pods/([^/]+)/log$`)

// kubectl runs kubectl as an administrator.
func (r *rig) kubectl(args ...string) string {
	r.Helper()
	return process.Output(r.T, r.kubectlCommand(args...))
}

func (r *rig) kubectlCommand(args ...string) *exec.Cmd {
	return exec.Command(process.Program("kubectl"), append([]string{"--kubeconfig", r.api.Kubeconfig}, args...)...)
}

// kubeconfig writes a kubeconfig for the gateway, with the token of an account.
func (r *rig) kubeconfig(file, token string) error {
	config := clientcmdapi.NewConfig()
	config.Clusters["c"] = &clientcmdapi.Cluster{
		Server: r.gateway.URL, CertificateAuthorityData: r.gatewayCA(), TLSServerName: "example.com",
	}
	config.AuthInfos["u"] = &clientcmdapi.AuthInfo{Token: token}
	config.Contexts["x"], config.CurrentContext = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}, "x"
	return clientcmd.WriteToFile(*config, file)
}

func (r *rig) gatewayCA() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: r.gateway.Certificate().Raw})
}

// register creates the object of a node, with its IPv4 address and further ones, and its Lease.
func (r *rig) register(host *testbed.Host, more ...netip.Addr) {
	r.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: host.Name(), Labels: map[string]string{corev1.LabelOSStable: "linux"}}}
	node.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: host.Addr4().String()}}
	for _, a := range more {
		node.Status.Addresses = append(node.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
	}
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	node.Status.Capacity = corev1.ResourceList{
		corev1.ResourcePods: resource.MustParse("110"),
		corev1.ResourceCPU:  resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("8Gi"),
	}
	node.Status.Allocatable = node.Status.Capacity // without it kube-scheduler gives the node no Pod
	if _, err := r.client.CoreV1().Nodes().Create(r.Context(), node, metav1.CreateOptions{}); err != nil {
		r.Fatal(err)
	}
	r.beat(host.Name())
}

// beat renews the Lease of a node until the test ends, as its kubelet does.
func (r *rig) beat(node string) {
	r.Helper()
	leases := r.client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	l := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: node}}
	l.Spec.LeaseDurationSeconds = new(int32(40))
	l, err := leases.Create(r.Context(), l, metav1.CreateOptions{})
	if err != nil {
		r.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(5 * time.Second)
		defer tick.Stop()
		for ctx.Err() == nil {
			now := metav1.NowMicro()
			l.Spec.RenewTime = &now
			if next, err := leases.Update(ctx, l, metav1.UpdateOptions{}); err == nil {
				l = next
			}
			select {
			case <-ctx.Done():
			case <-tick.C:
			}
		}
	})
	r.Cleanup(func() { stop(); wg.Wait() })
}

// unknownKind is in answers of the admission plugin OwnerReferencesPermissionEnforcement before Kubernetes 1.37: it learns of kinds of
// new definitions within half a minute. No right helps, and the request is repeated.
const unknownKind = "cannot find RESTMapping"

// checkRights fails the test for each request of the node's programs that was not allowed, but for those given.
func (r *rig) checkRights(but ...string) {
	r.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, request := range r.rejected {
		if !slices.Contains(but, request) {
			r.Errorf("a right is missing: %s", request)
		}
	}
}

// run starts the command of a Pod template's first container on a node, with the rights of its service account and
// nothing else, and waits for its readiness probe.
func (r *rig) run(node *testbed.Host, template corev1.PodTemplateSpec) *process.Process {
	r.Helper()
	spec := template.Spec
	file := filepath.Join(r.TempDir(), "kubeconfig")
	if err := r.kubeconfig(file, r.token(spec.ServiceAccountName, node.Name(), "")); err != nil {
		r.Fatal(err)
	}
	c := spec.Containers[0]
	mounts := strings.NewReplacer(r.mount(node.Name(), spec)...)
	args := slices.Clone(c.Args)
	for i := range args {
		args[i] = strings.ReplaceAll(strings.ReplaceAll(args[i], "$(NODE_NAME)", node.Name()), "$(POD_IP)", node.Addr4().String())
		args[i] = mounts.Replace(args[i])
	}
	cmd := node.Command(context.Background(), process.Program("fairlead"), args...)
	cmd.Env = []string{"KUBECONFIG=" + file, "HOME=" + r.TempDir(), "PATH=" + os.Getenv("PATH")}
	p := process.Start(r.T, cmd)
	for _, probe := range []*corev1.Probe{c.ReadinessProbe, c.LivenessProbe} {
		if probe == nil {
			r.Errorf("%s lacks a readiness or a liveness probe", c.Name)
			continue
		}
		r.probe(node, p, &c, probe)
	}
	return p
}

// token returns a token of an account in kube-system that, as that of a Pod, names the node. Without an audience it is for the API
// server.
func (r *rig) token(account, node, audience string) string {
	r.Helper()
	bound := &authv1.TokenRequest{Spec: authv1.TokenRequestSpec{BoundObjectRef: &authv1.BoundObjectReference{
		APIVersion: "v1", Kind: "Node", Name: node,
	}}}
	if audience != "" {
		bound.Spec.Audiences = []string{audience}
	}
	token, err := r.client.CoreV1().ServiceAccounts("kube-system").CreateToken(r.Context(), account, bound, metav1.CreateOptions{})
	if err != nil {
		r.Fatal(err)
	}
	return token.Status.Token
}

// probe waits for a success of a container's probe.
func (r *rig) probe(node *testbed.Host, p *process.Process, c *corev1.Container, probe *corev1.Probe) {
	r.Helper()
	port, host := probe.HTTPGet.Port, cmp.Or(probe.HTTPGet.Host, node.Addr4().String())
	for _, named := range c.Ports {
		if named.Name == port.StrVal {
			port = intstr.FromInt32(named.ContainerPort)
		}
	}
	testbed.Until(r.T, "an answer of "+c.Name+" to its probe", func() error {
		out, err := process.Try(node.Command(r.Context(), "curl", "-sf", "-m", "2",
			fmt.Sprintf("http://%s:%s%s", host, port.String(), probe.HTTPGet.Path)))
		if err != nil {
			return fmt.Errorf("%w: %s\n%s", err, out, p.Log())
		}
		return nil
	})
}

// mount writes the ConfigMaps and tokens that the first container mounts on a node into directories, and returns pairs of the path in
// the container and the directory.
func (r *rig) mount(node string, spec corev1.PodSpec) (paths []string) {
	r.Helper()
	for _, v := range spec.Volumes {
		files := map[string]string{}
		switch {
		case v.ConfigMap != nil:
			config, err := r.client.CoreV1().ConfigMaps("kube-system").Get(r.Context(), v.ConfigMap.Name, metav1.GetOptions{})
			if err != nil {
				r.Fatal(err)
			}
			files = config.Data
		case v.Projected != nil:
			token := v.Projected.Sources[0].ServiceAccountToken
			files[token.Path] = r.token(spec.ServiceAccountName, node, token.Audience)
		default:
			continue
		}
		dir := r.TempDir()
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				r.Fatal(err)
			}
		}
		for _, m := range spec.Containers[0].VolumeMounts {
			if m.Name == v.Name {
				paths = append(paths, m.MountPath, dir)
			}
		}
	}
	return paths
}

// The manifests, applied as they are beside kubeadm's Corefile, run each component with sufficient rights: endpoints are
// kept, names resolve, and a Service, an Ingress and a Gateway get addresses from a pool of MetalLB.
func TestManifests(t *testing.T) {
	r := newRig(t)
	r.kubectl("create", "configmap", "coredns", "-n", "kube-system", "--from-file=Corefile=../../internal/corefile/testdata/kubeadm.Corefile")
	r.kubectl("apply", "-k", ".")
	r.kubectl("apply", "-f", "nodelocaldns.yaml")
	r.register(r.node)
	r.register(r.node2)
	deployments, err1 := r.client.AppsV1().Deployments("kube-system").List(t.Context(), metav1.ListOptions{})
	daemons, err2 := r.client.AppsV1().DaemonSets("kube-system").List(t.Context(), metav1.ListOptions{})
	if err1 != nil || err2 != nil {
		t.Fatal(err1, err2)
	}
	if len(deployments.Items) < 2 || len(daemons.Items) < 1 {
		t.Fatalf("%d Deployments and %d DaemonSets", len(deployments.Items), len(daemons.Items))
	}
	for _, d := range deployments.Items {
		r.run(r.node, d.Spec.Template)
	}
	for _, d := range daemons.Items {
		node := r.node
		if d.Name == "fairlead-node-local-dns" {
			node = r.node2
		}
		r.run(node, d.Spec.Template)
	}
	service := r.createService()
	r.checkEndpoints()
	r.checkName(r.node, r.node.Addr4().String(), service.Spec.ClusterIP)
	r.checkName(r.node2, "10.96.0.10", service.Spec.ClusterIP)
	r.checkAddress()
	r.checkFronts()
	r.checkRemoval()
	r.checkRights()
	for _, account := range []string{"fairlead-controllers", "fairlead-dns", "fairlead-node-local-dns", "fairlead-lb"} {
		r.checkUnused(account)
	}
}

// createService makes a Service with one ready Pod, and a pool of addresses.
func (r *rig) createService() *corev1.Service {
	r.Helper()
	ctx, core := r.Context(), r.client.CoreV1()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web", Labels: map[string]string{"app": "web"}}}
	pod.Spec = corev1.PodSpec{NodeName: "node1", Containers: []corev1.Container{{Name: "web", Image: "web"}}}
	pod, err := core.Pods("default").Create(ctx, pod, metav1.CreateOptions{})
	if err != nil {
		r.Fatal(err)
	}
	pod.Status = corev1.PodStatus{
		Phase: corev1.PodRunning, PodIP: "10.244.1.9", PodIPs: []corev1.PodIP{{IP: "10.244.1.9"}},
		Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
	}
	if _, err := core.Pods("default").UpdateStatus(ctx, pod, metav1.UpdateOptions{}); err != nil {
		r.Fatal(err)
	}
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}}
	s.Spec = corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, Selector: map[string]string{"app": "web"}, Ports: []corev1.ServicePort{{Port: 80}},
	}
	if s, err = core.Services("default").Create(ctx, s, metav1.CreateOptions{}); err != nil {
		r.Fatal(err)
	}
	file := filepath.Join(r.TempDir(), "metallb.yaml")
	if err := os.WriteFile(file, []byte(metallb), 0o600); err != nil {
		r.Fatal(err)
	}
	r.applyConverted(file)
	r.applyConverted("../../internal/lb/metallb/testdata/all.yaml", "--dry-run=server")
	return s
}

// metallb is a pool of MetalLB that is announced by ARP.
const metallb = `
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: default, namespace: metallb-system}
spec: {addresses: [192.168.77.200-192.168.77.210]}
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata: {name: default, namespace: metallb-system}
`

// apply applies manifests, as soon as the kinds are served.
func (r *rig) apply(text string, flags ...string) {
	r.Helper()
	testbed.Until(r.T, "the kinds of the manifests", func() error {
		cmd := r.kubectlCommand(append([]string{"apply", "-f", "-"}, flags...)...)
		cmd.Stdin = strings.NewReader(text)
		out, err := process.Try(cmd)
		if err != nil {
			return fmt.Errorf("%w: %s\n%s", err, out, text)
		}
		return nil
	})
}

// applyConverted applies what 'fairlead lb convert' makes of a configuration of MetalLB.
func (r *rig) applyConverted(file string, flags ...string) {
	r.Helper()
	convert := exec.Command(process.Program("fairlead"), "lb", "convert", "-f", file)
	text, err := convert.Output()
	if err != nil {
		r.Fatalf("fairlead lb convert -f %s: %v", file, err)
	}
	r.apply(string(text), flags...)
}

func (r *rig) checkEndpoints() {
	r.Helper()
	testbed.Until(r.T, "the endpoint of the Service", func() error {
		slices, err := r.client.DiscoveryV1().EndpointSlices("default").List(r.Context(),
			metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=web"})
		if err != nil || len(slices.Items) != 1 || len(slices.Items[0].Endpoints) != 1 {
			text, _ := json.Marshal(slices)
			return fmt.Errorf("%w: %s", err, text)
		}
		return nil
	})
}

func (r *rig) checkName(node *testbed.Host, server, want string) {
	r.Helper()
	testbed.Until(r.T, "the name of the Service at "+server, func() error {
		out, err := process.Try(node.Command(r.Context(), "dig", "+short", "+time=1", "+tries=1",
			"@"+server, "web.default.svc.cluster.local"))
		if err != nil || strings.TrimSpace(out) != want {
			return fmt.Errorf("%w: %q, want %s", err, out, want)
		}
		return nil
	})
}

func (r *rig) checkAddress() {
	r.Helper()
	testbed.Until(r.T, "an announced address of the Service", func() error {
		out := r.kubectl("get", "service", "web", "-o", "jsonpath={.status.loadBalancer.ingress[0].ip}")
		if !strings.HasPrefix(out, "192.168.77.20") {
			return fmt.Errorf("the address is %q", out)
		}
		return nil
	})
	leases := r.kubectl("get", "leases", "-n", "kube-system", "-o", "name")
	for _, name := range []string{"fairlead-controllers", "fairlead-lb"} {
		if !strings.Contains(leases, name) {
			r.Errorf("%s elects no leader: %s", name, leases)
		}
	}
}

// fronts are an Ingress and a Gateway, with objects of all kinds whose statuses fairlead lb writes.
const fronts = `
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: shop}
spec: {ingressClassName: fairlead, defaultBackend: {service: {name: web, port: {number: 80}}}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: shop}
spec: {gatewayClassName: fairlead, listeners: [{name: http, port: 80, protocol: HTTP}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: shop}
spec: {parentRefs: [{name: shop}], rules: [{backendRefs: [{name: web, port: 80}]}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: GRPCRoute
metadata: {name: shop}
spec: {parentRefs: [{name: shop}], rules: [{backendRefs: [{name: web, port: 80}]}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: TLSRoute
metadata: {name: shop}
spec: {parentRefs: [{name: shop}], hostnames: [shop.example], rules: [{backendRefs: [{name: web, port: 80}]}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: TCPRoute
metadata: {name: shop}
spec: {parentRefs: [{name: shop}], rules: [{backendRefs: [{name: web, port: 80}]}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: UDPRoute
metadata: {name: shop}
spec: {parentRefs: [{name: shop}], rules: [{backendRefs: [{name: web, port: 80}]}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: ListenerSet
metadata: {name: shop}
spec: {parentRef: {name: shop}, listeners: [{name: more, port: 81, protocol: HTTP}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: BackendTLSPolicy
metadata: {name: shop}
spec:
  targetRefs: [{group: "", kind: Service, name: web}]
  validation: {hostname: shop.example, wellKnownCACertificates: System}
`

func (r *rig) checkFronts() {
	r.Helper()
	r.apply(fronts)
	page := "http://127.0.0.1:10267/request?arm=true&id=" + strings.Repeat("1", 32) // what 'fairlead trace URL' asks by the Pod
	if out := process.Output(r.T, r.node.Command(r.Context(), "curl", "-sS", "-m", "10", page)); out != `{"node":"node1","armed":true}` {
		r.Errorf("fairlead lb on a trace of a request: %s", out)
	}
	for _, field := range []string{
		"ingress/shop {.status.loadBalancer.ingress[0].ip}", "gateway/shop {.status.addresses[0].value}",
		"httproute/shop {.status.parents[0].controllerName}", "grpcroute/shop {.status.parents[0].controllerName}",
		"tlsroute/shop {.status.parents[0].controllerName}", "tcproute/shop {.status.parents[0].controllerName}",
		"udproute/shop {.status.parents[0].controllerName}", "listenerset/shop {.status.conditions[0].type}",
		"backendtlspolicy/shop {.status.ancestors[0].controllerName}",
	} {
		object, path, _ := strings.Cut(field, " ")
		testbed.Until(r.T, field, func() error {
			out, err := process.Try(r.kubectlCommand("get", object, "-o", "jsonpath="+path))
			if err == nil && out == "" {
				err = errors.New("it is empty")
			}
			return err
		})
	}
}

// checkRemoval takes back what was made, first the Pod's label, and looks that what the components made of it is gone, too.
func (r *rig) checkRemoval() {
	r.Helper()
	left := func(want string) {
		testbed.Until(r.T, "the end of "+want, func() error {
			out := r.kubectl("get", "endpoints,endpointslices,services", "-o", "yaml") + r.kubectl("get", "ipaddresses", "-o", "name")
			if strings.Contains(out, want) {
				return errors.New(out)
			}
			return nil
		})
	}
	r.kubectl("label", "pod", "web", "app=none", "--overwrite")
	left("10.244.1.9")
	r.kubectl("delete", "service/web", "gateway/shop", "ingress/shop")
	left("name: web")
	left("192.168.77.2")
}

// Every workload runs with as little as it can: no write access to its root, no further privilege, a seccomp profile.
func TestManifestsAreConfined(t *testing.T) {
	var chart struct{ AppVersion string }
	file, err := os.ReadFile("../helm/fairlead/Chart.yaml")
	if err == nil {
		err = yaml.Unmarshal(file, &chart)
	}
	if err != nil || chart.AppVersion == "" {
		t.Fatalf("the version of the chart: %q, %v", chart.AppVersion, err)
	}
	text := process.Output(t, exec.Command(process.Program("kubectl"), "kustomize", "."))
	controller, err := os.ReadFile("lb-controller.yaml")
	if err != nil {
		t.Fatal(err)
	}
	text += "\n---\n" + string(controller)
	checked := 0
	for _, document := range strings.Split(text, "\n---\n") {
		if !strings.Contains(document, "kind: Deployment") && !strings.Contains(document, "kind: DaemonSet") {
			continue
		}
		var d appsv1.Deployment // a DaemonSet has its template at the same place
		if err := yaml.Unmarshal([]byte(document), &d); err != nil {
			t.Fatal(err)
		}
		checked++
		pod := d.Spec.Template.Spec
		c := pod.Containers[0]
		s := c.SecurityContext
		switch {
		case s == nil || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem,
			s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation,
			s.Capabilities == nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}),
			pod.SecurityContext == nil || pod.SecurityContext.SeccompProfile == nil:
			t.Errorf("%s has more than it needs: %+v", d.Name, s)
		}
		if pod.PriorityClassName == "" || c.Resources.Requests.Memory().IsZero() {
			t.Errorf("%s has no priority class or no requests", d.Name)
		}
		if c.Image != "fairlead/fairlead:"+chart.AppVersion {
			t.Errorf("%s has the image %s, and the chart the version %s", d.Name, c.Image, chart.AppVersion)
		}
	}
	if checked < 5 {
		t.Errorf("only %d workloads", checked)
	}
}
