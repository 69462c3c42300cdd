package lb

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/gateway/api"
	gatewaycontroller "github.com/fairlead/fairlead/internal/gateway/controller"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/lb/acme"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
)

// frontDoor is a bed with the controller of Gateways and Ingresses.
type frontDoor struct {
	*bed
	dynamic dynamic.Interface
	api     *api.Client
	browser *testbed.Host
	ca      string // a file
	// ctl returns a command of kubectl, nil if the test itself reaches the API.
	ctl func(ctx context.Context, args ...string) *exec.Cmd
}

// newFrontDoor returns one. orders, if there is one, makes what orders certificates.
func newFrontDoor(t *testing.T, nodes int, orders ...func(*frontDoor, *slog.Logger, *events.Recorder) *acme.Manager) *frontDoor {
	t.Helper()
	b := newBed(t, nodes)
	f := &frontDoor{bed: b, browser: b.net.Outside("browser"), ca: filepath.Join(t.TempDir(), "ca.pem")}
	local := rest.CopyConfig(b.local)
	var err error
	f.dynamic, err = dynamic.NewForConfig(local)
	b.must(err)
	f.api, err = api.NewClient(local)
	b.must(err)
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	recorder := events.NewRecorder(b.client, corev1.EventSource{Component: svc.LoadBalancer}, log)
	o := gatewaycontroller.Options{Config: local, Log: log, Events: recorder, Gateway: true}
	for _, make := range orders {
		o.Orders = make(f, log, recorder)
		running.Go(func() { o.Orders.Run(ctx) })
	}
	running.Go(func() {
		defer recorder.Start()()
		if err := gatewaycontroller.Run(ctx, o); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return f
}

// resources are the names of the kinds in documents.
var resources = map[string]string{
	"Service": "services", "Gateway": "gateways", "HTTPRoute": "httproutes", "Ingress": "ingresses", "ReferenceGrant": "referencegrants",
	"TLSRoute": "tlsroutes", "TCPRoute": "tcproutes", "UDPRoute": "udproutes", "ListenerSet": "listenersets",
	"BackendTLSPolicy": "backendtlspolicies", "IngressClass": "ingressclasses", "Secret": "secrets",
}

// apply applies manifests.
func (f *frontDoor) apply(text string) {
	f.Helper()
	for doc := range strings.SplitSeq(text, "\n---\n") {
		object := map[string]any{}
		f.must(yaml.Unmarshal([]byte(doc), &object))
		o := unstructured.Unstructured{Object: object}
		gv, err := schema.ParseGroupVersion(o.GetAPIVersion())
		f.must(err)
		all := f.dynamic.Resource(gv.WithResource(resources[o.GetKind()]))
		kind := dynamic.ResourceInterface(all)
		if o.GetKind() != "IngressClass" {
			kind = all.Namespace(cmp.Or(o.GetNamespace(), "default"))
		}
		_, err = kind.Apply(f.Context(), o.GetName(), &o, metav1.ApplyOptions{FieldManager: "test", Force: true})
		f.must(err)
	}
}

// pod serves a Service of the documents.
func (f *frontDoor) pod(name string, port uint16) {
	f.Helper()
	host := f.net.Host(name)
	f.backend(host, name, netip.AddrPortFrom(host.Addr4(), port))
}

// backend serves a Service with a port "http" at a host's address: it answers with the Service's name and the request line.
func (f *frontDoor) backend(host *testbed.Host, name string, at netip.AddrPort) {
	f.Helper()
	var l net.Listener
	host.Do(func() { l = host.ListenTCP(at) })
	testbed.Serve(f, l, tells(name))
	f.slice(name, "http", corev1.ProtocolTCP, at)
}

// tells answers a request with a name and the request line.
func tells(name string) func(net.Conn) {
	return func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		body := fmt.Sprintf("%s: %s %s %s\n", name, r.Method, r.RequestURI, r.Proto)
		_, _ = fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", len(body), body)
	}
}

// slice makes the EndpointSlice of a Service with one Pod, for the family of its address.
func (f *frontDoor) slice(name, portName string, protocol corev1.Protocol, at netip.AddrPort) {
	f.Helper()
	family := svc.FamilyOf(at.Addr()).String()
	_, err := f.client.DiscoveryV1().EndpointSlices("default").Create(f.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name + "-" + strings.ToLower(family), Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressType(family),
		Ports:       []discoveryv1.EndpointPort{{Name: &portName, Port: new(int32(at.Port())), Protocol: &protocol}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{at.Addr().String()}}},
	}, metav1.CreateOptions{})
	f.must(err)
}

// secret makes a TLS Secret, whose certificate curl trusts.
func (f *frontDoor) secret(namespace, name, host string) {
	f.Helper()
	cert, key := f.keyPair(host)
	_, err := f.client.CoreV1().Secrets(namespace).Create(f.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Type: corev1.SecretTypeTLS,
		Data: map[string][]byte{corev1.TLSCertKey: cert, corev1.TLSPrivateKeyKey: key},
	}, metav1.CreateOptions{})
	f.must(err)
	file, err := os.OpenFile(f.ca, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	f.must(err)
	_, err = file.Write(cert)
	f.must(err)
	f.must(file.Close())
}

// document returns the manifests of a document, and its commands with what they print: the blocks that name a test.
func (f *frontDoor) document(name, test string) (manifests string, commands [][2]string) {
	f.Helper()
	text, err := os.ReadFile("../../docs/" + name)
	f.must(err)
	block := func(language string) [][]byte {
		return regexp.MustCompile("(?s)<!-- run by test/lb/" + test + " -->\n```" + language + "\n(.*?)```").FindSubmatch(text)
	}
	manifest, console := block("yaml"), block("console")
	if manifest == nil || console == nil {
		f.Fatalf("docs/%s has no marked blocks", name)
	}
	for _, part := range strings.Split(string(console[1]), "$ curl ")[1:] {
		command, out, _ := strings.Cut(part, "\n")
		commands = append(commands, [2]string{command, strings.TrimSpace(out)})
	}
	return string(manifest[1]), commands
}

// curl runs a command of a document at an address.
func (f *frontDoor) curl(command string, vip string) (string, error) {
	ctx, cancel := context.WithTimeout(f.Context(), 10*time.Second)
	defer cancel()
	args := strings.Fields(strings.NewReplacer("192.0.2.100", vip, "ca.pem", f.ca).Replace(command))
	out, err := f.browser.Command(ctx, "curl", append([]string{"--noproxy", "*"}, args...)...).Output()
	return strings.TrimSpace(string(out)), err
}

// answers checks that the commands of a document print what stands below them.
func (f *frontDoor) answers(vip string, commands [][2]string) {
	f.Helper()
	for _, c := range commands {
		testbed.Until(f, c[0], func() error {
			out, err := f.curl(c[0], vip)
			if err != nil || out != c[1] {
				return fmt.Errorf("curl %s: %q, %v; want %q", c[0], out, err, c[1])
			}
			return nil
		})
	}
}

// docs/gateway.md and docs/ingress.md are true: what they apply is served to an outside client, the statuses report it, and
// what is deleted is closed (behaviours 90, 188, 189).
func TestFrontDoor(t *testing.T) {
	inParallel(t)
	f := newFrontDoor(t, 1)
	f.pod("web", 8080)
	f.pod("cart", 8081)
	f.secret("default", "shop-tls", "shop.example.com")
	f.secret("default", "books-tls", "books.example.com")
	awaitClass(f, f.api)
	manifests, commands := f.document("gateway.md", "frontdoor_test.go")
	f.apply(manifests)
	vip := f.programmed("shop")
	f.answers(vip, commands)
	f.maintenance(vip, commands)
	f.attack(vip)
	f.statuses()
	f.streams()
	f.policies(vip)

	manifests, commands = f.document("ingress.md", "frontdoor_test.go")
	f.apply(manifests)
	shared := ""
	testbed.Until(f, "the Ingress's address", func() error {
		in, err := f.client.NetworkingV1().Ingresses("default").Get(t.Context(), "books", metav1.GetOptions{})
		if err == nil && len(in.Status.LoadBalancer.Ingress) == 0 {
			err = fmt.Errorf("status %+v", in.Status)
		}
		if err == nil {
			shared = in.Status.LoadBalancer.Ingress[0].IP
		}
		return err
	})
	f.answers(shared, commands)
	manifests, commands = f.document("ingress.md", "frontdoor_test.go, for ingress-nginx")
	f.apply(manifests)
	f.answers(shared, commands)
	f.ingressEvents("private", "IngressNotServed", "auth-url")
	f.reannotate("private", `{"nginx.ingress.kubernetes.io/auth-url": null}`)
	f.answers(shared, [][2]string{{
		"-s --resolve books.example.com:443:192.0.2.100 --cacert ca.pem https://books.example.com/private/x", "web: GET /private/x HTTP/1.1",
	}})

	f.authorization(shared, vip)
	f.errorPages(shared)

	f.must(f.api.Routes("default").Delete(t.Context(), "shop", metav1.DeleteOptions{}))
	f.answers(vip, [][2]string{{
		"-s --resolve shop.example.com:80:192.0.2.100 -o /dev/null -w %{http_code} http://shop.example.com/", "404",
	}})
	f.families()
	f.must(f.api.Gateways("default").Delete(t.Context(), "shop", metav1.DeleteOptions{}))
	testbed.Until(f, "the end of the Gateway's Service", func() error {
		n := names.ServiceOfGateway(svc.Name{Namespace: "default", Name: "shop"})
		_, err := f.client.CoreV1().Services(n.Namespace).Get(t.Context(), n.Name, metav1.GetOptions{})
		if err == nil {
			return fmt.Errorf("Service %s is still there", n)
		}
		return nil
	})
}

// authorization checks what Ingresses have of authorization, and attacks it: without its Service or its Secret no request passes. gateway
// is where a Gateway has the same.
func (f *frontDoor) authorization(vip, gateway string) {
	f.Helper()
	host := f.net.Host("auth")
	at := netip.AddrPortFrom(host.Addr4(), 8082)
	var l net.Listener
	host.Do(func() { l = host.ListenTCP(at) })
	testbed.Serve(f, l, func(c net.Conn) {
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		status := "401 Unauthorized"
		if strings.HasPrefix(r.URL.Path, "/check") && r.Header.Get("Cookie") == "session=alice" {
			status = "200 OK"
		}
		body := ""
		if r.URL.Path == "/page" {
			status, body = "200 OK", strings.Repeat("A page.\n", 1000)
		}
		_, _ = fmt.Fprintf(c, "HTTP/1.1 %s\r\nX-User: alice\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s",
			status, len(body), body)
	})
	manifests, commands := f.document("ingress.md", "frontdoor_test.go, authorization")
	f.apply(manifests)
	f.slice("auth", "http", corev1.ProtocolTCP, at)
	f.answers(vip, commands)
	f.compressed(vip)
	f.externalAuth(gateway)
	code := func(host string) string {
		return "-s -o /dev/null -w %{http_code} -u alice:secret -H Cookie:session=alice --resolve " + host + ":80:192.0.2.100 " +
			"http://" + host + "/x"
	}
	for _, to := range []string{"http://169.254.169.254/latest/meta-data/", "http://127.0.0.1/", "http://" + at.String() + "/check"} {
		f.reannotate("members", `{"nginx.ingress.kubernetes.io/auth-url": "`+to+`"}`)
		f.answers(vip, [][2]string{{code("members.example.com"), "503"}})
	}
	f.ingressEvents("members", "IngressNotServed", "auth-url")
	f.reannotate("members", `{"nginx.ingress.kubernetes.io/auth-url": "http://auth/check"}`)
	f.answers(vip, [][2]string{{code("members.example.com"), "200"}})
	f.must(f.client.DiscoveryV1().EndpointSlices("default").Delete(f.Context(), "auth-ipv4", metav1.DeleteOptions{}))
	f.answers(vip, [][2]string{{code("members.example.com"), "500"}})
	f.must(f.client.CoreV1().Secrets("default").Delete(f.Context(), "staff", metav1.DeleteOptions{}))
	f.answers(vip, [][2]string{{code("staff.example.com"), "503"}})
	f.ingressEvents("staff", "IngressNotServed", "does not exist")
}

// maintenance checks what docs/gateway.md has of it, and that the commands of the route print the same afterwards.
func (f *frontDoor) maintenance(vip string, commands [][2]string) {
	f.Helper()
	text, err := os.ReadFile("../../docs/gateway.md")
	f.must(err)
	page := regexp.MustCompile(`annotate httproute shop fairlead\.dev/maintenance='(.*)'`).FindSubmatch(text)
	if page == nil {
		f.Fatal("docs/gateway.md annotates no route")
	}
	for _, value := range []string{string(page[1]), "no", ""} {
		patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{svc.MaintenanceAnnotation: value}}})
		f.must(err)
		_, err = f.dynamic.Resource(schema.GroupVersionResource{
			Group: gwv1.GroupName, Version: "v1", Resource: "httproutes",
		}).Namespace("default").Patch(f.Context(), "shop",
			types.MergePatchType, patch, metav1.PatchOptions{})
		f.must(err)
		down := value == string(page[1])
		if down {
			f.answers(vip, [][2]string{{"-s --resolve shop.example.com:80:192.0.2.100 -w ,%{http_code},%header{retry-after},%{content_type} " +
				"http://shop.example.com/cart/7", value + ",503,60,text/html; charset=utf-8"}})
		}
		testbed.Until(f, "the condition of the route", func() error {
			r, err := f.api.Routes("default").Get(f.Context(), "shop", metav1.GetOptions{})
			if err != nil || len(r.Status.Parents) != 1 {
				return fmt.Errorf("%v, status %+v", err, r.Status)
			}
			c := meta.FindStatusCondition(r.Status.Parents[0].Conditions, names.ConditionMaintenance)
			if (c != nil) != (value != "") || c != nil && (c.Status == metav1.ConditionTrue) != down {
				return fmt.Errorf("%q: condition %+v", value, c)
			}
			return nil
		})
		if !down {
			f.answers(vip, commands)
		}
	}
}

// errorPages checks what Ingresses have of error pages. A default backend of another namespace gives none: the answer of the Pod stays.
func (f *frontDoor) errorPages(vip string) {
	f.Helper()
	serve := func(name string, answer func(q *http.Request) (status int, body string)) {
		f.apply("apiVersion: v1\nkind: Service\nmetadata: {name: " + name + "}\nspec: {ports: [{name: http, port: 80}]}")
		host := f.net.Host(name)
		at := netip.AddrPortFrom(host.Addr4(), 8083)
		var l net.Listener
		host.Do(func() { l = host.ListenTCP(at) })
		testbed.Serve(f, l, func(c net.Conn) {
			q, err := http.ReadRequest(bufio.NewReader(c))
			if err != nil {
				return
			}
			status, body := answer(q)
			_, _ = fmt.Fprintf(c, "HTTP/1.1 %d -\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", status, len(body), body)
		})
		f.slice(name, "http", corev1.ProtocolTCP, at)
	}
	serve("orders", func(q *http.Request) (int, string) {
		if strings.HasPrefix(q.URL.Path, "/orders/") {
			return http.StatusOK, "orders: GET " + q.RequestURI + " HTTP/1.1\n"
		}
		return http.StatusNotFound, "no such order"
	})
	serve("error-pages", func(q *http.Request) (int, string) {
		status, _ := strconv.Atoi(q.Header.Get("X-Code"))
		return status, "We have nothing at " + q.Header.Get("X-Original-URI") + ".\n"
	})
	manifests, commands := f.document("ingress.md", "frontdoor_test.go, error pages")
	f.apply(manifests)
	f.answers(vip, commands)
	const missing = "-s --resolve errors.bar.com:80:192.0.2.100 -w %{http_code} http://errors.bar.com/missing"
	f.reannotate("shop", `{"nginx.ingress.kubernetes.io/default-backend": "kube-system/error-pages"}`)
	f.answers(vip, [][2]string{{missing, "no such order404"}})
	f.ingressEvents("shop", "IngressAnnotationIgnored", "is no name of a Service")
	f.reannotate("shop", `{"fairlead.dev/maintenance": "Back at ten."}`)
	f.answers(vip, [][2]string{{missing, "Back at ten.503"}})
	f.reannotate("shop", `{"fairlead.dev/maintenance": "no"}`)
	f.answers(vip, [][2]string{{missing, "no such order404"}})
	f.ingressEvents("shop", "IngressAnnotationIgnored", "it counts as false, and requests are served")
	f.reannotate("shop", `{"fairlead.dev/maintenance": null}`)
	f.answers(vip, [][2]string{{missing, "no such order404"}})
}

// compressed checks that an Ingress that asks for it has answers compressed for clients that accept it.
func (f *frontDoor) compressed(vip string) {
	f.Helper()
	f.apply(`apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: page, annotations: {fairlead.dev/lb-compress: gzip}}
spec:
  ingressClassName: nginx
  rules:
  - host: page.example.com
    http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: auth, port: {number: 80}}}}]}`)
	const get = "-s -o /dev/null -w %header{content-encoding},%header{vary} --resolve page.example.com:80:192.0.2.100 " +
		"http://page.example.com/page"
	f.answers(vip, [][2]string{{"--compressed " + get, "gzip,Accept-Encoding"}, {get, ",Accept-Encoding"}})
}

// awaitClass waits until the GatewayClass is accepted.
func awaitClass(t testing.TB, client *api.Client) {
	t.Helper()
	testbed.Until(t, "the GatewayClass", func() error {
		c, err := client.Classes().Get(t.Context(), names.ClassName, metav1.GetOptions{})
		if err == nil && (!meta.IsStatusConditionTrue(c.Status.Conditions, "Accepted") || len(c.Status.SupportedFeatures) == 0) {
			err = fmt.Errorf("status %+v", c.Status)
		}
		return err
	})
}

// reannotate changes annotations of an Ingress, and nothing else.
func (f *frontDoor) reannotate(name, annotations string) {
	f.Helper()
	patch := []byte(`{"metadata": {"annotations": ` + annotations + `}}`)
	_, err := f.client.NetworkingV1().Ingresses("default").Patch(f.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{})
	f.must(err)
}

// ingressEvents waits for an Event of an Ingress whose text has a part.
func (f *frontDoor) ingressEvents(name, reason, part string) {
	f.Helper()
	testbed.Until(f, "the Event "+reason+" of Ingress "+name, func() error {
		list, err := f.client.CoreV1().Events("default").List(f.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.InvolvedObject.Name == name && e.Reason == reason && strings.Contains(e.Message, part) {
				return nil
			}
		}
		return fmt.Errorf("%d Events, not this one", len(list.Items))
	})
}

// programmed waits until a Gateway is served, and returns its address.
func (f *frontDoor) programmed(name string) (vip string) {
	f.Helper()
	testbed.Until(f, "the address of Gateway "+name, func() error {
		g, err := f.api.Gateways("default").Get(f.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range g.Status.Conditions {
			if c.Type == "Programmed" && c.Status == metav1.ConditionTrue && len(g.Status.Addresses) > 0 {
				vip = g.Status.Addresses[0].Value
				return nil
			}
		}
		text, _ := json.Marshal(g.Status)
		return fmt.Errorf("status %s", text)
	})
	return vip
}

// families has the Gateway ask for addresses: it has these and no others, or is not programmed.
func (f *frontDoor) families() {
	f.Helper()
	ask := func(addresses, programmed string, want int) []gwv1.GatewayStatusAddress {
		f.Helper()
		patch := []byte(`{"spec": {"addresses": ` + addresses + `}}`)
		_, err := f.dynamic.Resource(schema.GroupVersion(gwv1.GroupVersion).WithResource("gateways")).Namespace("default").
			Patch(f.Context(), "shop", types.MergePatchType, patch, metav1.PatchOptions{})
		f.must(err)
		var have []gwv1.GatewayStatusAddress
		testbed.Until(f, "the addresses "+addresses, func() error {
			g, err := f.api.Gateways("default").Get(f.Context(), "shop", metav1.GetOptions{})
			if err != nil {
				return err
			}
			have = g.Status.Addresses
			c := meta.FindStatusCondition(g.Status.Conditions, "Programmed")
			if c == nil || c.Reason != programmed || c.ObservedGeneration != g.Generation || len(have) != want {
				return fmt.Errorf("addresses %v, %+v", have, c)
			}
			return nil
		})
		return have
	}
	both := ask("null", "Programmed", 2)
	for _, a := range both { // the second family needs another Service
		only := ask(`[{"value": "`+a.Value+`"}]`, "Programmed", 1)
		if only[0].Value != a.Value {
			f.Errorf("the Gateway has %v, and asked for %s", only, a.Value)
		}
	}
	_ = ask(`[{"value": "`+both[0].Value+`"}, {"value": "`+both[1].Value+`"}]`, "Programmed", 2)
	_ = ask(`[{"value": "203.0.113.9"}]`, "AddressNotUsable", 0)
	_ = ask("null", "Programmed", 2)
}

// attack asks for paths around the rule for /cart, and by TLS of one host for another one.
func (f *frontDoor) attack(vip string) {
	f.Helper()
	get := "-s --path-as-is --resolve shop.example.com:80:192.0.2.100 http://shop.example.com"
	code := "-s --path-as-is -o /dev/null -w %{http_code} --resolve shop.example.com:80:192.0.2.100 http://shop.example.com"
	f.answers(vip, [][2]string{
		{get + "//cart/7", "cart: GET /7 HTTP/1.1"},
		{get + "/x/../cart/7", "cart: GET /7 HTTP/1.1"},
		{get + "/%63art/7?q=/../x", "cart: GET /7?q=/../x HTTP/1.1"},
		{code + "/x/..;/cart/7", "400"},
		{code + "/x%2f..%2fcart", "400"},
		{code + "/cart%2f7", "400"},
		{"-s -o /dev/null -w %{http_code} --resolve shop.example.com:443:192.0.2.100 --cacert ca.pem -H Host:other.example.com " +
			"https://shop.example.com/", "421"},
	})
}

// statuses checks what the route and the listeners report.
func (f *frontDoor) statuses() {
	f.Helper()
	r, err := f.api.Routes("default").Get(f.Context(), "shop", metav1.GetOptions{})
	f.must(err)
	p := r.Status.Parents
	if len(p) != 1 || p[0].Conditions[0].Status != metav1.ConditionTrue || p[0].ControllerName != names.ControllerName {
		f.Errorf("parents %+v", p)
	}
	g, err := f.api.Gateways("default").Get(f.Context(), "shop", metav1.GetOptions{})
	f.must(err)
	for _, l := range g.Status.Listeners {
		if l.AttachedRoutes != 1 {
			f.Errorf("listener %s has %d routes", l.Name, l.AttachedRoutes)
		}
	}
}
