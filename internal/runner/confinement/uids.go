package confinement

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	fieldpath "k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
)

// UIDRange are otherwise unused users and groups of the machine: each namespace
// gets idsPerNamespace of them, for its Pods that are not allowed to be privileged.
type UIDRange struct{ First, Last uint32 }

// DefaultUIDRange lies behind the users of containers in systemd's list of what is used
// (https://systemd.io/UIDS-GIDS), and has room for 4,096 namespaces.
var DefaultUIDRange = UIDRange{0x7000_0000, 0x7fff_ffff}

// idsPerNamespace is how many users a Pod can name: all that 16 bits can.
const idsPerNamespace = 1 << 16

// ParseUIDRange reads FIRST-LAST.
func ParseUIDRange(s string) (UIDRange, error) {
	a, b, ok := strings.Cut(s, "-")
	first, err1 := strconv.ParseUint(a, 10, 32)
	last, err2 := strconv.ParseUint(b, 10, 32)
	// The last number of all is no user (setresuid(2)).
	if !ok || err1 != nil || err2 != nil || first < idsPerNamespace || last < first+idsPerNamespace-1 || last >= 1<<32-1 {
		return UIDRange{}, fmt.Errorf("range of users %q: want FIRST-LAST with at least %d users from %d on, such as %s",
			s, idsPerNamespace, idsPerNamespace, DefaultUIDRange)
	}
	return UIDRange{uint32(first), uint32(last)}, nil
}

func (r UIDRange) String() string { return fmt.Sprintf("%d-%d", r.First, r.Last) }

// uids knows the users of each namespace; they stay the same while the node has a Pod of
// the namespace, over restarts too, and when the range changes.
type uids struct {
	ids  UIDRange
	file string

	mu    sync.Mutex
	first map[string]uint32 // of idsPerNamespace each
}

func loadUIDs(ids UIDRange, stateDir string) (*uids, error) {
	u := &uids{ids: ids, file: filepath.Join(stateDir, "uids.json"), first: map[string]uint32{}}
	b, err := os.ReadFile(u.file)
	if errors.Is(err, os.ErrNotExist) {
		return u, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &u.first)
	}
	if err == nil {
		err = u.adoptSlots()
	}
	for ns, first := range u.first {
		if other := u.owner(first, ns); err == nil && other != "" {
			err = fmt.Errorf("%s: namespaces %s and %s have users in common: end the Pods of both and remove the file", u.file, ns, other)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("read the users of namespaces: %w", err)
	}
	return u, nil
}

// adoptSlots replaces what earlier builds recorded, the place of a namespace's users in
// the range (0, 1, …), by the first of these users. No user is as low as that: see ParseUIDRange.
func (u *uids) adoptSlots() error {
	adopted := false
	for ns, slot := range u.first {
		if slot >= idsPerNamespace {
			continue
		}
		first := uint64(u.ids.First) + uint64(slot)*idsPerNamespace
		if first >= 1<<32 {
			return fmt.Errorf("%s: the users of namespace %s are not in --pod-uid-range %s: end its Pods and remove the file", u.file, ns, u.ids)
		}
		u.first[ns], adopted = uint32(first), true
	}
	if !adopted {
		return nil
	}
	return u.store()
}

// store writes the record.
func (u *uids) store() error {
	b, err := json.Marshal(u.first)
	if err == nil {
		err = fileio.Replace(u.file, b, 0o600)
	}
	return err
}

// owner returns a namespace other than except that has one of the idsPerNamespace users
// from first on, "" if there is none.
func (u *uids) owner(first uint32, except string) string {
	for ns, have := range u.first {
		if ns != except && max(have, first)-min(have, first) < idsPerNamespace {
			return ns
		}
	}
	return ""
}

// within reports whether the users of a namespace are in the range.
func (u *uids) within(first uint32) bool {
	return first >= u.ids.First && uint64(first)+idsPerNamespace-1 <= uint64(u.ids.Last)
}

// base returns the first user of a namespace. used reports whether the node has a Pod of
// a namespace; when no users are left, namespaces without one lose theirs.
func (u *uids) base(namespace string, used func(string) bool) (uint32, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if first, ok := u.first[namespace]; ok {
		if !u.within(first) {
			return 0, fmt.Errorf("the users of namespace %s, from %d on, are not in --pod-uid-range %s: end its Pods and remove %s",
				namespace, first, u.ids, u.file)
		}
		return first, nil
	}
	first, ok := u.free()
	if !ok {
		for ns := range u.first {
			if !used(ns) {
				delete(u.first, ns)
			}
		}
		if first, ok = u.free(); !ok {
			return 0, fmt.Errorf("no users are left for namespace %s: Pods of %d namespaces have all of --pod-uid-range %s; widen it",
				namespace, len(u.first), u.ids)
		}
	}
	u.first[namespace] = first
	if err := u.store(); err != nil {
		delete(u.first, namespace)
		return 0, fmt.Errorf("record the users of namespace %s: %w", namespace, err)
	}
	return first, nil
}

// free returns the first of users that no namespace has.
func (u *uids) free() (uint32, bool) {
	for first := u.ids.First; u.within(first); first += idsPerNamespace {
		if u.owner(first, "") == "" {
			return first, true
		}
	}
	return 0, false
}

// checkIDs returns the first user or group of a container that is none of its namespace's,
// with the path of the field.
func checkIDs(pod *corev1.Pod, c *corev1.Container) error {
	bad := func(at *fieldpath.Path, id *int64) error {
		if id == nil || *id >= 0 && *id < idsPerNamespace {
			return nil
		}
		return fieldpath.Invalid(at, *id, fmt.Sprintf("users and groups of a Pod go from 0 to %d, unless Pod Security allows it to be privileged",
			idsPerNamespace-1))
	}
	all, own := pod.Spec.SecurityContext, c.SecurityContext
	if all == nil {
		all = &corev1.PodSecurityContext{}
	}
	if own == nil {
		own = &corev1.SecurityContext{}
	}
	at, above := containerPath(pod, c.Name).Child("securityContext"), fieldpath.NewPath("spec", "securityContext")
	err := cmp.Or(bad(at.Child("runAsUser"), own.RunAsUser), bad(at.Child("runAsGroup"), own.RunAsGroup),
		bad(above.Child("fsGroup"), all.FSGroup))
	if own.RunAsUser == nil {
		err = cmp.Or(err, bad(above.Child("runAsUser"), all.RunAsUser))
	}
	if own.RunAsGroup == nil {
		err = cmp.Or(err, bad(above.Child("runAsGroup"), all.RunAsGroup))
	}
	for i := range all.SupplementalGroups {
		err = cmp.Or(err, bad(above.Child("supplementalGroups").Index(i), &all.SupplementalGroups[i]))
	}
	return err
}

// containerPath is the path of a container in its Pod.
func containerPath(pod *corev1.Pod, name string) *fieldpath.Path {
	at := fieldpath.NewPath("spec")
	if i := slices.IndexFunc(pod.Spec.InitContainers, func(c corev1.Container) bool { return c.Name == name }); i >= 0 {
		return at.Child("initContainers").Index(i)
	}
	return at.Child("containers").Index(slices.IndexFunc(pod.Spec.Containers, func(c corev1.Container) bool { return c.Name == name }))
}
