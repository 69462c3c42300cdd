package rbac

import (
	"fmt"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
)

// world is a Resolver that knows n bindings of other users besides one of
// "bob", in namespace "ns".
func world(t testing.TB, n int) *Resolver {
	t.Helper()
	f := informers.NewSharedInformerFactory(fake.NewClientset(), 0)
	r, err := NewResolver(f)
	if err != nil {
		t.Fatal(err)
	}
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "reader"},
		Rules: []rbacv1.PolicyRule{{Verbs: []string{"get"}, APIGroups: []string{""}, Resources: []string{"pods"}}}}
	if err := f.Rbac().V1().ClusterRoles().Informer().GetIndexer().Add(role); err != nil {
		t.Fatal(err)
	}
	for i := range n + 1 {
		who := "bob"
		if i > 0 {
			who = fmt.Sprint("other-", i)
		}
		b := &rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("b", i)},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: kindClusterRole, Name: "reader"},
			Subjects:   []rbacv1.Subject{{Kind: "User", APIGroup: rbacv1.GroupName, Name: who}},
		}
		if err := r.bindings.Add(b); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func bobReads() authorizer.Attributes {
	return authorizer.AttributesRecord{
		User: &user.DefaultInfo{Name: "bob", Groups: []string{"a", "b", user.AllAuthenticated}},
		Verb: "get", Resource: "pods", Namespace: "ns", Name: "p", ResourceRequest: true,
	}
}

// What a decision costs does not grow with the bindings of others: the same
// work, counted in allocations, with 10 and with 10,000 of them.
func TestCostFollowsTheSubject(t *testing.T) {
	cost := func(n int) float64 {
		r := world(t, n)
		return testing.AllocsPerRun(100, func() {
			if d, _, err := r.Authorize(t.Context(), bobReads()); d != authorizer.DecisionAllow || err != nil {
				t.Fatal(d, err)
			}
		})
	}
	if few, many := cost(10), cost(10_000); many > few {
		t.Errorf("%v allocations with 10 bindings, %v with 10,000", few, many)
	}
}

func BenchmarkAuthorize(b *testing.B) {
	for _, n := range []int{10, 10_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			r, a := world(b, n), bobReads()
			b.ReportAllocs()
			for b.Loop() {
				if d, _, _ := r.Authorize(b.Context(), a); d != authorizer.DecisionAllow {
					b.Fatal(d)
				}
			}
		})
	}
}
