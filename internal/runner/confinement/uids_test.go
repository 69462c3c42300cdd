package confinement

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// No user belongs to two namespaces: while a range is used up, after restarts, and when
// the range changes under Pods that run.
func TestUIDs(t *testing.T) {
	dir := t.TempDir()
	open := func(first, last uint32) *uids {
		t.Helper()
		u, err := loadUIDs(UIDRange{first, last}, dir)
		if err != nil {
			t.Fatal(err)
		}
		return u
	}
	busy := map[string]bool{"a": true, "b": true}
	used := func(ns string) bool { return busy[ns] }
	expect := func(u *uids, ns string, want uint32, why string) {
		t.Helper()
		got, err := u.base(ns, used)
		if got != want || why == "" && err != nil || why != "" && (err == nil || !strings.Contains(err.Error(), why)) {
			t.Errorf("%s: %d, %v; want %d and %q", ns, got, err, want, why)
		}
	}
	const k = idsPerNamespace
	u := open(10*k, 12*k-1)
	expect(u, "a", 10*k, "")
	expect(u, "b", 11*k, "")
	expect(u, "a", 10*k, "")
	expect(u, "c", 0, "no users are left for namespace c: Pods of 2 namespaces have all of --pod-uid-range 655360-786431")
	u = open(10*k, 12*k-1)
	expect(u, "b", 11*k, "")
	busy["a"], busy["c"] = false, true
	expect(u, "c", 10*k, "")
	expect(u, "a", 0, "no users are left")
	// b and c keep what they have; others get what overlaps with neither.
	u = open(10*k+1000, 13*k+999)
	expect(u, "b", 11*k, "")
	expect(u, "c", 0, "the users of namespace c, from 655360 on, are not in --pod-uid-range")
	expect(u, "d", 12*k+1000, "")
	// An earlier build recorded places in the range; they become users, once.
	if err := os.WriteFile(filepath.Join(dir, "uids.json"), []byte(`{"a": 0, "b": 2}`), 0o600); err != nil {
		t.Fatal(err)
	}
	u = open(10*k, 14*k-1)
	expect(u, "a", 10*k, "")
	expect(u, "b", 12*k, "")
	expect(u, "c", 11*k, "")
	u = open(11*k, 14*k-1) // the range changes after the upgrade
	expect(u, "b", 12*k, "")
	expect(u, "a", 0, "the users of namespace a, from 655360 on, are not in --pod-uid-range")
	// A file that cannot be right is no reason to give users away once more.
	for _, damaged := range []string{`{"a": 65535}`, `{"a": 655360, "b": 655361}`, `{"a": 655360`} {
		if err := os.WriteFile(filepath.Join(dir, "uids.json"), []byte(damaged), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := loadUIDs(UIDRange{10 * k, 12*k - 1}, dir); err == nil {
			t.Errorf("%s: no error", damaged)
		}
	}
}

func TestParseUIDRange(t *testing.T) {
	for text, ok := range map[string]bool{
		DefaultUIDRange.String(): true, "65536-131071": true, "65536-131070": false, "0-131071": false, "131072-65536": false,
		"4294836224-4294967294": true, "4294836224-4294967295": false, "65536": false, "a-b": false,
	} {
		if _, err := ParseUIDRange(text); (err == nil) != ok {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// A Pod that may not be privileged only names users of its namespace; root of the Pod is
// one of them. The error has the field's path.
func TestUsersOfPods(t *testing.T) {
	uids, err := loadUIDs(DefaultUIDRange, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	here := &Confinement{o: Options{UIDs: DefaultUIDRange}, uids: uids} // whoever runs the test
	const message = ": users and groups of a Pod go from 0 to 65535, unless Pod Security allows it to be privileged"
	for want, s := range map[string]corev1.PodSpec{
		"": {SecurityContext: &corev1.PodSecurityContext{
			RunAsUser: new(int64(0)), RunAsGroup: new(int64(65535)), FSGroup: new(int64(0)), SupplementalGroups: []int64{65535},
		}},
		"spec.securityContext.runAsUser: Invalid value: 65536":  {SecurityContext: &corev1.PodSecurityContext{RunAsUser: new(int64(65536))}},
		"spec.securityContext.runAsGroup: Invalid value: 70000": {SecurityContext: &corev1.PodSecurityContext{RunAsGroup: new(int64(70000))}},
		"spec.securityContext.fsGroup: Invalid value: 70000":    {SecurityContext: &corev1.PodSecurityContext{FSGroup: new(int64(70000))}},
		"spec.securityContext.supplementalGroups[1]: Invalid value: 1879048192": {
			SecurityContext: &corev1.PodSecurityContext{SupplementalGroups: []int64{1, 0x7000_0000}},
		},
		"spec.containers[1].securityContext.runAsUser: Invalid value: 65536": {Containers: []corev1.Container{
			{Name: "other"}, {Name: "c", SecurityContext: &corev1.SecurityContext{RunAsUser: new(int64(65536))}},
		}},
		"spec.initContainers[0].securityContext.runAsGroup: Invalid value: 65536": {InitContainers: []corev1.Container{
			{Name: "c", SecurityContext: &corev1.SecurityContext{RunAsGroup: new(int64(65536))}},
		}},
	} {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}, Spec: s}
		c := &corev1.Container{Name: "c"}
		for _, list := range [][]corev1.Container{s.InitContainers, s.Containers} {
			for i := range list {
				if list[i].Name == "c" {
					c = &list[i]
				}
			}
		}
		w, err := here.Of(p, c)
		var refused RefusedError
		switch {
		case want == "" && (err != nil || w.IDs.Base != DefaultUIDRange.First || w.IDs.Size != idsPerNamespace || w.UID != 0):
			t.Errorf("users of the namespace: %+v, %v", w, err)
		case want != "" && (!errors.As(err, &refused) || err.Error() != want+message):
			t.Errorf("%v\nwant %s", err, want)
		}
		p.Annotations = map[string]string{"fairlead.dev/pod-security": "privileged"}
		if _, err := here.Of(p, c); err != nil {
			t.Errorf("a Pod that may be privileged: %v", err)
		}
	}
}

// What Pod Security rejects at the server a node does not do either, where a Pod has no level.
func TestConfinedPodsAreNotUnmasked(t *testing.T) {
	uids, err := loadUIDs(DefaultUIDRange, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	here := &Confinement{o: Options{UIDs: DefaultUIDRange}, uids: uids} // whoever runs the test
	for want, s := range map[string]corev1.SecurityContext{
		"privileged: true is for Pods":   {Privileged: new(true)},
		"procMount Unmasked is for Pods": {ProcMount: new(corev1.UnmaskedProcMount)},
	} {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}}
		_, err := here.Of(p, &corev1.Container{Name: "c", SecurityContext: &s})
		var refused RefusedError
		if !errors.As(err, &refused) || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
		p.Annotations = map[string]string{"fairlead.dev/pod-security": "privileged"}
		if _, err := here.Of(p, &corev1.Container{Name: "c", SecurityContext: &s}); err != nil {
			t.Errorf("a Pod that may be privileged: %v", err)
		}
	}
}
