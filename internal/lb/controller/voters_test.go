package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fairlead/fairlead/internal/lb/claim"
	"github.com/fairlead/fairlead/internal/lb/quorum"
	v1 "github.com/fairlead/fairlead/internal/lb/v1"
	"github.com/fairlead/fairlead/internal/svc"
)

// The list of voters follows the speakers, one change at a time; it is written again
// when it is deleted, and the key of the speakers is made once.
func TestVoters(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	_, stop := r.run(nil)
	ctx := context.Background()
	secrets := r.client.CoreV1().Secrets(svc.SystemNamespace)
	key, err := secrets.Get(ctx, svc.SpeakerKeySecret, metav1.GetOptions{})
	r.must(err)
	if len(key.Data[claim.KeyEntry]) != claim.KeyBytes {
		t.Errorf("the key has %d bytes", len(key.Data[claim.KeyEntry]))
	}
	lists := func() (l quorum.Lists) {
		have, err := r.client.CoreV1().ConfigMaps(svc.SystemNamespace).Get(ctx, svc.VotersConfigMap, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return l
		}
		r.must(err)
		r.must(json.Unmarshal([]byte(have.Data[claim.VotersEntry]), &l))
		return l
	}
	// confirm lets the speakers use the current list, as speakers do.
	confirm := func(names ...string) {
		for _, name := range names {
			r.eventually("confirm", func() error {
				s, err := r.lb.Speakers.Get(ctx, name, metav1.GetOptions{})
				if err != nil {
					return err
				}
				s.Status.Endpoints = []string{"192.0.2.1:7000"}
				list := lists().Current
				text, err := json.Marshal(list)
				r.must(err)
				s.Status.VoterVersion, s.Status.VoterList = int64(list.Version), string(text)
				_, err = r.lb.Speakers.UpdateStatus(ctx, s, metav1.UpdateOptions{})
				return err
			})
		}
	}
	wants := func(want string, names ...string) {
		t.Helper()
		r.eventually("voters "+want, func() error {
			confirm(names...)
			l := lists()
			var got []string
			for _, v := range l.Current.Voters {
				got = append(got, v.Name)
			}
			if l.Current.Witness {
				got = append(got, "witness")
			}
			if strings.Join(got, " ") != want {
				return fmt.Errorf("%+v", l)
			}
			return nil
		})
	}
	for _, name := range []string{"n1", "n2", "n3"} {
		_, err := r.client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		r.must(err)
		_, err = r.lb.Speakers.Create(ctx, &v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		r.must(err)
	}
	wants("n1", "n1")
	wants("n1 n2 n3", "n1", "n2", "n3")
	// The API server does not hear of a voter: the others, and the witness, can lose another one.
	hears := func(name string, ready corev1.ConditionStatus) {
		node, err := r.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		r.must(err)
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}}
		_, err = r.client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{})
		r.must(err)
	}
	hears("n2", corev1.ConditionUnknown)
	wants("n1 n3 witness", "n1", "n3")
	hears("n2", corev1.ConditionTrue)
	wants("n1 n2 n3", "n1", "n2", "n3")
	version := lists().Current.Version
	r.must(r.client.CoreV1().ConfigMaps(svc.SystemNamespace).Delete(ctx, svc.VotersConfigMap, metav1.DeleteOptions{}))
	confirm("n1")
	r.eventually("the list is written again", func() error {
		if got := lists().Current.Version; got != version {
			return fmt.Errorf("version %d, want %d", got, version)
		}
		return nil
	})
	r.must(r.client.CoreV1().Nodes().Delete(ctx, "n3", metav1.DeleteOptions{}))
	wants("n1 n2 witness", "n1", "n2")
	r.eventually("the Speaker of the deleted Node goes", func() error {
		confirm("n1", "n2")
		_, err := r.lb.Speakers.Get(ctx, "n3", metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("%v, %+v", err, lists())
		}
		return nil
	})
	stop()
	// A new process does not remember what was deleted meanwhile, but the speakers do.
	lost := lists()
	r.must(r.client.CoreV1().ConfigMaps(svc.SystemNamespace).Delete(ctx, svc.VotersConfigMap, metav1.DeleteOptions{}))
	r.run(nil)
	r.eventually("the lost list is restored", func() error {
		l := lists()
		if l.Current.Version <= lost.Current.Version+1 || l.Previous.Version != lost.Current.Version ||
			!slices.Equal(l.Current.Voters, lost.Current.Voters) {
			return fmt.Errorf("%+v, want %+v", l, lost)
		}
		return nil
	})
	if again, err := secrets.Get(ctx, svc.SpeakerKeySecret, metav1.GetOptions{}); err != nil || again.UID != key.UID {
		t.Errorf("the key is another one after a restart: %v", err)
	}
}

// What does not fit the Speaker object is counted, and the rest can be written.
func TestStatusIsBounded(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	_, stop := r.run(nil) // it defines the kind, and would delete the object of a node that is not there
	stop()
	var status v1.SpeakerStatus
	for i := range 3 * v1.MaxAnnounced {
		a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).String()
		status.Addresses = append(status.Addresses, v1.AnnouncedAddress{Address: a, Via: "arp", Since: metav1.NowMicro()})
		status.Networks = append(status.Networks, a+"/32")
	}
	status.VoterVersion = 7
	status.Bound()
	made, err := r.lb.Speakers.Create(t.Context(), &v1.Speaker{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}, metav1.CreateOptions{})
	r.must(err)
	made.Status = status
	_, err = r.lb.Speakers.UpdateStatus(t.Context(), made, metav1.UpdateOptions{})
	r.must(err)
	got, err := r.lb.Speakers.Get(t.Context(), "n1", metav1.GetOptions{})
	r.must(err)
	if got.Status.VoterVersion != 7 || got.Status.AddressCount != 3*v1.MaxAnnounced || len(got.Status.Addresses) != v1.MaxAnnounced {
		t.Errorf("list %d, %d of %d addresses", got.Status.VoterVersion, len(got.Status.Addresses), got.Status.AddressCount)
	}
}
