package controller

import (
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	v1 "github.com/fairlead/fairlead/internal/lb/v1"
)

// What people have set in announce of a pool of a flag stays, also when the flag's ranges change.
func TestAnnounceOfFlagPoolsStays(t *testing.T) {
	t.Parallel()
	f := flagPool(t, "a", "192.0.2.0/28")
	labels := map[string]string{managedByLabel: managedByFlags}
	have := &v1.IPAddressPool{ObjectMeta: metav1.ObjectMeta{Name: "a", Labels: labels}, Spec: f.spec(nil)}
	have.Spec.Announce = []string{v1.AnnounceARP}
	if err := (&poolKeeper{}).keepFlagPool(t.Context(), f, have); err != nil { // without a client, so it must not write
		t.Error(err)
	}
	if got := flagPool(t, "a", "192.0.2.0/27").spec(have); !slices.Equal(got.Announce, have.Spec.Announce) ||
		slices.Equal(got.Addresses, have.Spec.Addresses) {
		t.Errorf("the pool becomes %+v", got)
	}
}
