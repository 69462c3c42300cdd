package front

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/gateway/watch"
	"github.com/fairlead/fairlead/internal/svc"
)

// The label of a Gateway's name has room for 63 bytes, a name for 253.
func TestFrontOfGateway(t *testing.T) {
	for _, c := range []struct {
		owner, kind string
		want        bool
	}{{"web", "Gateway", true}, {strings.Repeat("g", 80), "Gateway", true}, {"web", "Deployment", false}, {"other", "Gateway", false}} {
		g := svc.Name{Namespace: "a", Name: c.owner}
		if c.owner == "other" {
			g.Name = "web"
		}
		n := gateway.ServiceOfGateway(g)
		r := routing{state: &watch.State{Fronts: map[svc.Name]*gateway.Front{g: {Table: &gateway.Table{}}}}}
		_, ok := r.frontOf(&corev1.Service{ObjectMeta: metav1.ObjectMeta{
			Namespace: n.Namespace, Name: n.Name, Labels: map[string]string{gateway.NameLabel: c.owner[:min(63, len(c.owner))]},
			OwnerReferences: []metav1.OwnerReference{{Kind: c.kind, Name: c.owner, Controller: new(true)}},
		}})
		if ok != c.want {
			t.Errorf("%+v: %t", c, ok)
		}
	}
}
