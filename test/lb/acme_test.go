package lb

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/fairlead/fairlead/internal/dialect"
	"github.com/fairlead/fairlead/internal/events"
	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/gateway/names"
	"github.com/fairlead/fairlead/internal/lb/acme"
	lbcontroller "github.com/fairlead/fairlead/internal/lb/controller"
	"github.com/fairlead/fairlead/internal/svc"
	"github.com/fairlead/fairlead/internal/testbed"
	"github.com/fairlead/fairlead/internal/testbed/pebble"
	"github.com/fairlead/fairlead/internal/testbed/process"
)

// The Gateway of docs/gateway.md and the Ingress of docs/ingress.md have their certificates ordered from a real authority, which a node
// answers by HTTP-01 and by TLS-ALPN-01: clients that trust the authority get to the Pods by HTTPS. What is not allowed is not ordered,
// and a condition has the reason.
func TestCertificatesOfFronts(t *testing.T) {
	inParallel(t)
	var authority *pebble.Authority
	f := newFrontDoor(t, 1, func(f *frontDoor, log *slog.Logger, recorder *events.Recorder) *acme.Manager {
		authority = pebble.Start(t, "example.com", map[string]netip.Addr{}, f.net.Outside("authority"))
		a := lbcontroller.ACME{
			Directory: authority.Directory, Email: "ops@example.com", Roots: authority.Roots, Limits: acme.DefaultLimits(),
			Domains: []acme.Domain{
				{Name: "example.com", Namespaces: []string{"default"}}, {Name: "bank.test", Namespaces: []string{"bank"}},
				{Name: "shop.example.com", Namespaces: []string{"shop"}},
			},
			Propagation: 2 * time.Second, Binding: acme.Binding{KeyID: pebble.KeyID, Key: pebble.Key()},
		}
		return a.Manager(f.client, log, recorder, func(*corev1.Service) bool { return true })
	})
	f.pod("web", 8080)
	awaitClass(f, f.api)
	vip := f.ordersOfGateway(authority)
	f.ordersOfSet(authority, vip)
	f.ordersOfSets(authority, vip)
	f.ordersOfIngress(authority)
	f.unorderedGateways()
}

// A server orders certificates for Gateways and ListenerSets by the flags that docs/gateway.md starts it with, and by the ones for an
// authority that knows its clients.
func TestCertificatesByFlags(t *testing.T) {
	inParallel(t)
	var authority *pebble.Authority
	c := newCluster(t, clusterOptions{before: func(host *testbed.Host) []string {
		authority = pebble.Start(t, "example.com", map[string]netip.Addr{}, host)
		file := func(name string, text []byte) string {
			path := filepath.Join(t.TempDir(), name)
			if err := os.WriteFile(path, text, 0o600); err != nil {
				t.Fatal(err)
			}
			return path
		}
		key := base64.RawURLEncoding.EncodeToString(pebble.Key())
		return []string{
			"--lb-acme-directory", authority.Within, "--lb-acme-email", "ops@example.com", "--lb-acme-domain", "example.com=default",
			"--lb-acme-ca-file", file("ca.pem", authority.CA),
			"--lb-acme-eab-key-id", pebble.KeyID, "--lb-acme-eab-key-file", file("key", []byte(key)),
		}
	}}, "n1")
	f := &frontDoor{bed: c.bed, browser: c.net.Outside("browser"), ca: filepath.Join(t.TempDir(), "ca.pem")}
	f.local = c.server.Config
	f.ctl = func(ctx context.Context, args ...string) *exec.Cmd {
		return c.host.Command(ctx, process.Program("kubectl"), append([]string{"--kubeconfig", c.server.Kubeconfig}, args...)...)
	}
	var err error
	f.dynamic, err = dynamic.NewForConfig(f.local)
	f.must(err)
	f.api, err = api.NewClient(f.local)
	f.must(err)
	f.pod("web", 8080)
	awaitClass(f, f.api)
	f.ordersOfSet(authority, f.ordersOfGateway(authority))
}

// ordersOfGateway has the certificate of the Gateway of docs/gateway.md ordered, and returns its address.
func (f *frontDoor) ordersOfGateway(authority *pebble.Authority) (vip string) {
	f.Helper()
	manifests, commands := f.document("gateway.md", "acme_test.go")
	asks := "  annotations: {" + dialect.ACME + ": http-01}\n"
	if !strings.Contains(manifests, asks) {
		f.Fatal("docs/gateway.md has no annotation of ACME")
	}
	// First the address, to which the name shall lead.
	f.apply(strings.Replace(manifests, asks, "", 1))
	testbed.Until(f, "the Gateway's address", func() error {
		g, err := f.api.Gateways("default").Get(f.Context(), "site", metav1.GetOptions{})
		if err == nil && len(g.Status.Addresses) == 0 {
			err = fmt.Errorf("status %+v", g.Status)
		}
		if err == nil {
			vip = g.Status.Addresses[0].Value
		}
		return err
	})
	authority.Zone.Lead("www.example.com", netip.MustParseAddr(vip))
	f.must(os.WriteFile(f.ca, authority.PEM, 0o600))
	f.apply(manifests)
	text, err := os.ReadFile("../../docs/gateway.md")
	f.must(err)
	wait := regexp.MustCompile(`(?m)^\$ kubectl (wait gateway/site .*)$`).FindSubmatch(text)
	if wait == nil {
		f.Fatal("docs/gateway.md does not wait for the certificate")
	}
	if out := f.kubectl(strings.Fields(string(wait[1]))...); !bytes.Contains(text, []byte("\n"+out+"\n")) {
		f.Errorf("kubectl %s: %q", wait[1], out)
	}
	f.answers(vip, commands)
	return vip
}

// ordersOfSets has the certificate of a ListenerSet ordered whose namespace has its own domain and Secret, which only nodes and the
// controller read. What a ListenerSet may not have is not ordered.
func (f *frontDoor) ordersOfSets(authority *pebble.Authority, vip string) {
	f.Helper()
	_, err := f.client.CoreV1().Namespaces().Create(f.Context(),
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, metav1.CreateOptions{})
	f.must(err)
	authority.Zone.Lead("www.shop.example.com", netip.MustParseAddr(vip))
	f.apply(setOf("shop", "own", "http-01", 443, "www.shop.example.com", "name: own-tls") + `
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: own, namespace: shop}
spec:
  parentRefs: [{kind: ListenerSet, name: own}]
  rules: [{filters: [{type: RequestRedirect, requestRedirect: {hostname: team.example.com}}]}]`)
	f.setCertified("shop", "own", metav1.ConditionTrue, "", "")
	f.answers(vip, [][2]string{{"-s --resolve www.shop.example.com:443:192.0.2.100 --cacert ca.pem -o /dev/null -w %{redirect_url} " +
		"https://www.shop.example.com/x", "https://team.example.com/x"}})
	if _, err := f.client.CoreV1().Secrets("default").Get(f.Context(), "own-tls", metav1.GetOptions{}); err == nil {
		f.Error("the Secret is of the Gateway's namespace")
	}

	for _, c := range []struct {
		name, value  string
		port         int
		host, secret string
		reason, text string
	}{
		{"thief", "http-01", 443, "b.example.com", "name: stolen", "ACMEHostNotAllowed", "namespace shop may not have one for b.example.com"},
		{"port", "http-01", 8443, "p.shop.example.com", "name: port", "Invalid", "port: want 443, or the challenge dns-01"},
		{"far", "http-01", 443, "f.shop.example.com", "name: far, namespace: default", "Invalid", "want a Secret of namespace shop"},
		{"slip", "htp-01", 443, "s.shop.example.com", "name: slip", "Invalid", "want one of dns-01, http-01, tls-alpn-01"},
	} {
		f.apply(setOf("shop", c.name, c.value, c.port, c.host, c.secret))
		f.setCertified("shop", c.name, metav1.ConditionFalse, c.reason, c.text)
	}
	f.apply(setOf("shop", "none", "", 443, "n.shop.example.com", "name: none")) // the annotation of the Gateway does not count
	testbed.Until(f, "the refusal of a ListenerSet without the annotation and the Secret", func() error {
		s, err := f.api.Sets("shop").Get(f.Context(), "none", metav1.GetOptions{})
		if err != nil || len(s.Status.Listeners) != 1 || meta.IsStatusConditionTrue(s.Status.Conditions, "Programmed") {
			return fmt.Errorf("%v, %+v", err, s)
		}
		l := s.Status.Listeners[0].Conditions
		if meta.FindStatusCondition(l, names.ConditionCertificate) != nil || !meta.IsStatusConditionFalse(l, "ResolvedRefs") {
			return fmt.Errorf("%+v", l)
		}
		return nil
	})
	for _, secret := range []svc.Name{
		{Namespace: "shop", Name: "stolen"}, {Namespace: "shop", Name: "port"}, {Namespace: "default", Name: "far"},
		{Namespace: "shop", Name: "slip"}, {Namespace: "shop", Name: "none"},
	} {
		if _, err := f.client.CoreV1().Secrets(secret.Namespace).Get(f.Context(), secret.Name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			f.Errorf("Secret %s: %v", secret, err)
		}
	}
}

// ordersOfSet has the certificate of the ListenerSet of docs/gateway.md ordered.
func (f *frontDoor) ordersOfSet(authority *pebble.Authority, vip string) {
	f.Helper()
	_, err := f.api.Gateways("default").Patch(f.Context(), "site", types.MergePatchType,
		[]byte(`{"spec":{"allowedListeners":{"namespaces":{"from":"All"}}}}`), metav1.PatchOptions{})
	f.must(err)
	authority.Zone.Lead("team.example.com", netip.MustParseAddr(vip))
	const test = "acme_test.go, ListenerSets"
	text, err := os.ReadFile("../../docs/gateway.md")
	f.must(err)
	const marker = "<!-- run by test/lb/" + test + " -->\n```"
	yaml := regexp.MustCompile("(?s)" + marker + "yaml\n(.*?)```").FindSubmatch(text)
	console := regexp.MustCompile(marker + "console\n\\$ kubectl (.*)\n(.*)\n\\$ curl (.*)\n(.*)\n```").FindSubmatch(text)
	if yaml == nil || console == nil {
		f.Fatal("docs/gateway.md orders no certificate of a ListenerSet")
	}
	f.apply(string(yaml[1]))
	if out := f.kubectl(strings.Fields(string(console[1]))...); out != string(console[2]) {
		f.Errorf("kubectl %s: %q", console[1], out)
	}
	f.answers(vip, [][2]string{{string(console[3]), string(console[4])}})
}

// setOf returns a ListenerSet of the Gateway site with one listener, which asks for a certificate.
func setOf(namespace, name, challenge string, port int, host, secret string) string {
	annotation := ""
	if challenge != "" {
		annotation = dialect.ACME + ": " + challenge
	}
	return fmt.Sprintf(`apiVersion: gateway.networking.k8s.io/v1
kind: ListenerSet
metadata: {name: %s, namespace: %s, annotations: {%s}}
spec:
  parentRef: {name: site, namespace: default}
  listeners:
  - {name: https, port: %d, protocol: HTTPS, hostname: "%s", tls: {certificateRefs: [{%s}]}}`,
		name, namespace, annotation, port, host, secret)
}

// setCertified waits for the condition of a ListenerSet about its certificate, and of its listener.
func (f *frontDoor) setCertified(namespace, name string, status metav1.ConditionStatus, reason, text string) {
	f.Helper()
	testbed.Until(f, "the certificate of ListenerSet "+name, func() error {
		s, err := f.api.Sets(namespace).Get(f.Context(), name, metav1.GetOptions{})
		if err != nil || len(s.Status.Listeners) != 1 {
			return fmt.Errorf("%v, %+v", err, s)
		}
		for _, all := range [][]metav1.Condition{s.Status.Conditions, s.Status.Listeners[0].Conditions} {
			c := meta.FindStatusCondition(all, names.ConditionCertificate)
			if c == nil || c.Status != status || reason != "" && c.Reason != reason || !strings.Contains(c.Message, text) {
				return fmt.Errorf("%+v", s.Status)
			}
		}
		return nil
	})
}

// ordersOfIngress has the certificate of an Ingress ordered.
func (f *frontDoor) ordersOfIngress(authority *pebble.Authority) {
	f.Helper()
	manifests, commands := f.document("ingress.md", "acme_test.go")
	asks := "  annotations: {" + dialect.ACME + ": tls-alpn-01}\n"
	f.apply(strings.Replace(manifests, asks, "", 1))
	vip := ""
	testbed.Until(f, "the Ingress's address", func() error {
		in, err := f.client.NetworkingV1().Ingresses("default").Get(f.Context(), "magazine", metav1.GetOptions{})
		if err == nil && len(in.Status.LoadBalancer.Ingress) == 0 {
			err = fmt.Errorf("status %+v", in.Status)
		}
		if err == nil {
			vip = in.Status.LoadBalancer.Ingress[0].IP
		}
		return err
	})
	authority.Zone.Lead("magazine.example.com", netip.MustParseAddr(vip))
	f.apply(manifests)
	f.answers(vip, commands)
	f.ingressEvents("magazine", "ACMECertificateIssued", "magazine.example.com")
}

// unorderedGateways checks why certificates are not ordered: a host of another namespace, one with a *, a typing error and a Secret of
// another namespace.
func (f *frontDoor) unorderedGateways() {
	f.Helper()
	for _, c := range []struct{ name, value, host, secret, reason, text string }{
		{"thief", "http-01", "www.bank.test", "name: stolen", "ACMEHostNotAllowed", "namespace default may not have one for www.bank.test"},
		{"wild", "http-01", "*.example.com", "name: wild", "Invalid", "only by dns-01"},
		{"slip", "htp-01", "b.example.com", "name: slip", "Invalid", "want one of dns-01, http-01, tls-alpn-01"},
		{"far", "http-01", "c.example.com", "name: far, namespace: kube-system", "Invalid", "want a Secret of namespace default"},
		{"twice", "http-01", "www.example.com", "name: www-tls", "OrderedElsewhere", "default/site"},
	} {
		f.apply(fmt.Sprintf(`apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: %s, annotations: {fairlead.dev/acme: "%s"}}
spec:
  gatewayClassName: fairlead
  listeners:
  - {name: https, port: 443, protocol: HTTPS, hostname: "%s", tls: {certificateRefs: [{%s}]}}`, c.name, c.value, c.host, c.secret))
		testbed.Until(f, "the condition of Gateway "+c.name, func() error {
			g, err := f.api.Gateways("default").Get(f.Context(), c.name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			k := meta.FindStatusCondition(g.Status.Conditions, names.ConditionCertificate)
			if k == nil || k.Status != metav1.ConditionFalse || k.Reason != c.reason || !strings.Contains(k.Message, c.text) {
				return fmt.Errorf("%+v", g.Status)
			}
			l := meta.FindStatusCondition(g.Status.Listeners[0].Conditions, names.ConditionCertificate)
			if l == nil || l.Reason != c.reason {
				return fmt.Errorf("listener: %+v", l)
			}
			return nil
		})
		if _, err := f.client.CoreV1().Secrets("kube-system").Get(f.Context(), "far", metav1.GetOptions{}); err == nil {
			f.Error("a Secret of another namespace was made")
		}
	}
}

// kubectl returns what the program prints.
func (f *frontDoor) kubectl(args ...string) string {
	f.Helper()
	ctx, cancel := context.WithTimeout(f.Context(), 3*time.Minute)
	defer cancel()
	if f.ctl != nil {
		return strings.TrimSpace(process.Output(f, f.ctl(ctx, args...)))
	}
	c := clientcmdapi.NewConfig()
	c.Clusters["c"] = &clientcmdapi.Cluster{Server: f.local.Host, CertificateAuthorityData: f.local.CAData, TLSServerName: f.local.ServerName}
	c.AuthInfos["u"] = &clientcmdapi.AuthInfo{
		Token: f.local.BearerToken, ClientCertificateData: f.local.CertData, ClientKeyData: f.local.KeyData,
	}
	c.Contexts["x"], c.CurrentContext = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u", Namespace: "default"}, "x"
	file := filepath.Join(f.TempDir(), "kubeconfig")
	f.must(clientcmd.WriteToFile(*c, file))
	cmd := exec.CommandContext(ctx, process.Program("kubectl"), append([]string{"--kubeconfig", file}, args...)...)
	return strings.TrimSpace(process.Output(f, cmd))
}
