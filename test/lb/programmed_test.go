package lb

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/testbed"
)

// A Gateway is not programmed while one of two nodes does not serve it; once it is, the first request is answered. The same holds for
// a port that is added to it.
func TestProgrammedEverywhere(t *testing.T) {
	inParallel(t)
	f := newFrontDoor(t, 2)
	f.pod("web", 8080)
	awaitClass(f, f.api)
	for _, n := range f.nodes {
		f.eligible(n)
	}
	late := f.nodes[1]
	gateway := func(ports ...int) string {
		text := "apiVersion: gateway.networking.k8s.io/v1\nkind: Gateway\nmetadata: {name: wide}\n" +
			"spec:\n  gatewayClassName: fairlead\n  listeners:\n"
		for _, p := range ports {
			text += fmt.Sprintf("    - {name: p%d, port: %d, protocol: HTTP}\n", p, p)
		}
		return text
	}
	f.apply(`apiVersion: v1
kind: Service
metadata: {name: web}
spec: {ports: [{name: http, port: 80}]}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: wide}
spec:
  parentRefs: [{name: wide}]
  rules: [{backendRefs: [{name: web, port: 80}]}]`)
	for i, ports := range [][]int{{80}, {80, 8080}} {
		late.Signal(syscall.SIGSTOP)
		f.apply(gateway(ports...))
		testbed.Until(f, "a Gateway that waits for "+late.name, func() error {
			g, err := f.api.Gateways("default").Get(t.Context(), "wide", metav1.GetOptions{})
			if err != nil {
				return err
			}
			k := meta.FindStatusCondition(g.Status.Conditions, "Programmed")
			if k == nil || k.ObservedGeneration != g.Generation || k.Status != metav1.ConditionFalse || k.Reason != "Pending" ||
				!strings.HasSuffix(k.Message, "nodes to serve it: "+late.name) {
				return fmt.Errorf("%+v", k)
			}
			return nil
		})
		late.Signal(syscall.SIGCONT)
		vip := f.programmed("wide")
		url := fmt.Sprintf("http://%s:%d/", vip, ports[i])
		if out, err := f.curl("-sS --max-time 10 "+url, vip); err != nil || out != "web: GET / HTTP/1.1" {
			t.Errorf("the first request of %s: %q, %v", url, out, err)
		}
	}
}
