package watch

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	gwv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/fairlead/fairlead/internal/gateway"
	"github.com/fairlead/fairlead/internal/svc"
)

// versionLength is how many bytes of a hash are enough: a front is only compared with itself.
const versionLength = 8

// updateVersions returns the versions of all fronts. Only what has changed costs something. The caller holds mu.
func (w *Watch) updateVersions() map[svc.Name]string {
	if w.versioned != w.secretChanges {
		for n := range w.fronts {
			w.rebuilt[n] = true
		}
	}
	for n := range w.rebuilt {
		have, had := w.versions[n]
		f := w.fronts[n]
		if f == nil {
			if delete(w.versions, n); had {
				w.copies.versions = nil
			}
		} else if next := w.versionOf(n, f); next != have {
			w.versions[n], w.copies.versions = next, nil
		}
	}
	clear(w.rebuilt)
	w.versioned = w.secretChanges
	return copyOf(w.versions, &w.copies.versions)
}

// versionOf returns the version of a front (State.Versions).
func (w *Watch) versionOf(n svc.Name, f *gateway.Front) string {
	of := struct {
		UIDs         []types.UID
		Gateway      gwv1.GatewayStatus
		Sets         []gwv1.ListenerSetStatus
		Certificates [][][]byte
	}{Gateway: f.Status(nil, "")}
	if g := w.objects.Gateways[n]; g != nil {
		of.UIDs = append(of.UIDs, g.UID)
	}
	silence(of.Gateway.Conditions)
	for i := range of.Gateway.Listeners {
		of.Gateway.Listeners[i].AttachedRoutes = 0
		silence(of.Gateway.Listeners[i].Conditions)
	}
	for _, name := range f.Sets() {
		if s := w.objects.Sets[name]; s != nil {
			of.UIDs = append(of.UIDs, s.UID)
		}
		status := f.SetStatus(name, "")
		silence(status.Conditions)
		for i := range status.Listeners {
			status.Listeners[i].AttachedRoutes = 0
			silence(status.Listeners[i].Conditions)
		}
		of.Sets = append(of.Sets, status)
	}
	for _, name := range slices.SortedFunc(slices.Values(f.Named), svc.Name.Compare) {
		if s := w.secrets[name]; s != nil && s.cert != nil {
			of.Certificates = append(of.Certificates, s.cert.Certificate)
		}
	}
	text, err := json.Marshal(of)
	if err != nil {
		panic(err) // plain values
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:versionLength])
}

// silence removes messages: a node may not read a Secret of another type, so it only knows that it cannot be used.
func silence(conditions []metav1.Condition) {
	for i := range conditions {
		conditions[i].Message = ""
	}
}
