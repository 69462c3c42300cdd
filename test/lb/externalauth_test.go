package lb

import (
	"context"
	"encoding/json"
	"net"
	"net/netip"
	"os"
	"strings"

	authv3 "github.com/envoyproxy/go-control-plane/envoy/service/auth/v3"
	"google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/fairlead/fairlead/internal/gateway/api"
	"github.com/fairlead/fairlead/internal/testbed"
)

// externalAuth checks the filter ExternalAuth of HTTPRoutes at a Gateway, once an administrator has installed the kinds of the
// experimental channel, with a server of each protocol. The Service auth is there.
func (f *frontDoor) externalAuth(vip string) {
	f.Helper()
	page, err := os.ReadFile("../../docs/gateway.md")
	f.must(err)
	_, rest, _ := strings.Cut(string(page), "<!-- run by internal/lb/proxied/web/authorize_test.go -->\n```yaml\n")
	example, _, _ := strings.Cut(rest, "```")
	route := &unstructured.Unstructured{}
	f.must(yaml.Unmarshal([]byte(example), &route.Object))
	routes := f.dynamic.Resource(schema.GroupVersionResource{
		Group: "gateway.networking.k8s.io", Version: "v1", Resource: "httproutes",
	}).Namespace("default")
	if _, err := routes.Create(f.Context(), route, metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
		f.Errorf("the standard channel has no such filter, and the API server answers %v", err)
	}
	f.experimental("httproutes.gateway.networking.k8s.io")
	testbed.Until(f, "the route of the experimental channel", func() error {
		_, err := routes.Create(f.Context(), route, metav1.CreateOptions{})
		return err
	})
	code := func(cookie string) string {
		return "-s -o /dev/null -w %{http_code} -H Cookie:session=" + cookie + " --resolve members.example.com:80:192.0.2.100 " +
			"http://members.example.com/x"
	}
	f.answers(vip, [][2]string{{code("alice"), "200"}, {code("bob"), "401"}})

	f.calls("asked")
	const byHTTP, byGRPC = `"protocol":"HTTP"`, `"protocol":"GRPC"`
	patch := func(auth string) error {
		_, err := routes.Patch(f.Context(), "members", types.MergePatchType, []byte(`{"spec":{"rules":[{"filters":[{"type":"ExternalAuth",`+
			`"externalAuth":{`+auth+`,"backendRef":{"name":"asked","port":80}}}],"backendRefs":[{"name":"web","port":80}]}]}}`),
			metav1.PatchOptions{})
		return err
	}
	for _, invalid := range []string{byGRPC, byGRPC + `,"http":{}`, byHTTP + `,"http":{},"grpc":{}`} {
		if err := patch(invalid); !apierrors.IsInvalid(err) {
			f.Errorf("%s: %v", invalid, err)
		}
	}
	f.must(patch(byGRPC + `,"grpc":{"allowedHeaders":["Cookie"]}`))
	f.answers(vip, [][2]string{{code("alice"), "200"}, {code("bob"), "403"}})
	f.must(f.client.DiscoveryV1().EndpointSlices("default").Delete(f.Context(), "asked-ipv4", metav1.DeleteOptions{}))
	f.answers(vip, [][2]string{{code("alice"), "503"}})
}

// experimental installs the definition of a kind of the experimental channel.
func (f *frontDoor) experimental(name string) {
	f.Helper()
	list, err := api.Definitions(api.Experimental)
	f.must(err)
	kinds := f.dynamic.Resource(schema.GroupVersionResource{
		Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions",
	})
	for _, d := range list {
		if d.Name != name {
			continue
		}
		have, err := kinds.Get(f.Context(), name, metav1.GetOptions{})
		f.must(err)
		next := &unstructured.Unstructured{}
		f.must(json.Unmarshal(d.Object, &next.Object))
		next.SetResourceVersion(have.GetResourceVersion())
		_, err = kinds.Update(f.Context(), next, metav1.UpdateOptions{})
		f.must(err)
	}
}

// admits is an authorization server of Envoy's protocol.
type admits struct {
	authv3.UnimplementedAuthorizationServer
}

func (admits) Check(_ context.Context, q *authv3.CheckRequest) (*authv3.CheckResponse, error) {
	code := codes.PermissionDenied
	if q.GetAttributes().GetRequest().GetHttp().GetHeaders()["cookie"] == "session=alice" {
		code = codes.OK
	}
	return &authv3.CheckResponse{Status: &status.Status{Code: int32(code)}}, nil //nolint:gosec // a small number
}

// calls makes a Service of an authorization server of Envoy's protocol.
func (f *frontDoor) calls(name string) {
	f.Helper()
	host := f.net.Host(name)
	at := netip.AddrPortFrom(host.Addr4(), 9000)
	var l net.Listener
	host.Do(func() { l = host.ListenTCP(at) })
	s := grpc.NewServer()
	authv3.RegisterAuthorizationServer(s, admits{})
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	f.Cleanup(func() {
		s.Stop()
		<-done
	})
	f.apply("apiVersion: v1\nkind: Service\nmetadata: {name: " + name + "}\nspec: {ports: [{name: grpc, port: 80}]}")
	f.slice(name, "grpc", corev1.ProtocolTCP, at)
}
