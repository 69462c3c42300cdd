// Package volumes prepares the volumes of Pods, follows the objects in them, and measures their size.
package volumes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/fairlead/fairlead/internal/kernel/fileio"
	"github.com/fairlead/fairlead/internal/kernel/mount"
	"github.com/fairlead/fairlead/internal/runner/values"
)

// Prepare prepares a volume of a Pod, whose files belong to o, and returns its path on the machine. dir is the volume's
// own directory below the Pod's.
func Prepare(ctx context.Context, f values.Facts, v *corev1.Volume, dir string, from values.Source, o Owner) (string, error) {
	switch {
	case v.EmptyDir != nil:
		if err := os.MkdirAll(dir, 0o777); err != nil {
			return "", err
		}
		return dir, errors.Join(os.Chmod(dir, 0o777), o.give(dir))
	case v.HostPath != nil:
		return v.HostPath.Path, checkHostPath(v.HostPath)
	case v.ConfigMap != nil:
		s := v.ConfigMap
		files, err := keyed(ctx, from, false, s.Name, s.Items, ptr.Deref(s.Optional, false))
		if err == nil {
			err = writeFiles(dir, files, s.DefaultMode, o)
		}
		return dir, err
	case v.Secret != nil:
		s := v.Secret
		files, err := keyed(ctx, from, true, s.SecretName, s.Items, ptr.Deref(s.Optional, false))
		if err == nil {
			err = writeFiles(dir, files, s.DefaultMode, o)
		}
		return dir, err
	case v.DownwardAPI != nil:
		files, err := downward(f, v.DownwardAPI.Items)
		if err == nil {
			err = writeFiles(dir, files, v.DownwardAPI.DefaultMode, o)
		}
		return dir, err
	case v.Projected != nil:
		files, err := projected(ctx, f, v.Projected, from)
		if err == nil {
			err = writeFiles(dir, files, v.Projected.DefaultMode, o)
		}
		return dir, err
	}
	return "", errors.New("this kind of volume is not supported: want emptyDir, hostPath, configMap, secret, downwardAPI or projected")
}

func checkHostPath(h *corev1.HostPathVolumeSource) error {
	kind := corev1.HostPathUnset
	if h.Type != nil {
		kind = *h.Type
	}
	st, err := os.Stat(h.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && kind == corev1.HostPathDirectoryOrCreate:
		return os.MkdirAll(h.Path, 0o755)
	case errors.Is(err, fs.ErrNotExist) && kind == corev1.HostPathFileOrCreate:
		file, err := os.OpenFile(h.Path, os.O_CREATE, 0o644)
		if err != nil {
			return err
		}
		return file.Close()
	case err != nil:
		return err
	}
	mode := st.Mode()
	ok := map[corev1.HostPathType]bool{
		corev1.HostPathUnset: true, corev1.HostPathDirectoryOrCreate: mode.IsDir(), corev1.HostPathDirectory: mode.IsDir(),
		corev1.HostPathFileOrCreate: mode.IsRegular(), corev1.HostPathFile: mode.IsRegular(),
		corev1.HostPathSocket: mode&fs.ModeSocket != 0, corev1.HostPathCharDev: mode&fs.ModeCharDevice != 0,
		corev1.HostPathBlockDev: mode&fs.ModeDevice != 0 && mode&fs.ModeCharDevice == 0,
	}
	if !ok[kind] {
		return fmt.Errorf("hostPath %s is not of type %s", h.Path, kind)
	}
	return nil
}

// file is a file of a volume; a nil mode means the volume's default.
type file struct {
	data []byte
	mode *int32
}

// MissingError is about an object or key of a volume that does not exist: only a change
// of the object helps.
type MissingError struct{ message string }

func (e MissingError) Error() string { return e.message }

// keyed are the files of a ConfigMap or Secret: all keys, or the keys of items.
func keyed(ctx context.Context, from values.Source, secret bool, name string, items []corev1.KeyToPath,
	optional bool) (map[string]file, error) {
	data, found, err := from.Data(ctx, secret, name)
	if err != nil {
		return nil, err
	}
	if !found && !optional {
		return nil, MissingError{fmt.Sprintf("%s %q does not exist in namespace %s", values.KindName(secret), name, from.Namespace)}
	}
	out := map[string]file{}
	if len(items) == 0 {
		for k, b := range data {
			out[k] = file{data: b}
		}
		return out, nil
	}
	for _, it := range items {
		b, ok := data[it.Key]
		if !ok && !optional {
			return nil, MissingError{fmt.Sprintf("%s %q has no key %q", values.KindName(secret), name, it.Key)}
		}
		if ok {
			out[it.Path] = file{data: b, mode: it.Mode}
		}
	}
	return out, nil
}

func downward(f values.Facts, items []corev1.DownwardAPIVolumeFile) (map[string]file, error) {
	out := map[string]file{}
	for _, it := range items {
		var value string
		err := errors.New("want fieldRef or resourceFieldRef")
		switch {
		case it.FieldRef != nil:
			value, err = values.Field(f, it.FieldRef.FieldPath)
		case it.ResourceFieldRef != nil:
			value, err = values.Resource(f, nil, it.ResourceFieldRef)
		}
		if err != nil {
			return nil, fmt.Errorf("downwardAPI item %s: %w", it.Path, err)
		}
		out[it.Path] = file{data: []byte(value), mode: it.Mode}
	}
	return out, nil
}

func projected(ctx context.Context, f values.Facts, p *corev1.ProjectedVolumeSource, from values.Source) (map[string]file, error) {
	out := map[string]file{}
	for _, s := range p.Sources {
		var files map[string]file
		var err error
		switch {
		case s.ConfigMap != nil:
			files, err = keyed(ctx, from, false, s.ConfigMap.Name, s.ConfigMap.Items, ptr.Deref(s.ConfigMap.Optional, false))
		case s.Secret != nil:
			files, err = keyed(ctx, from, true, s.Secret.Name, s.Secret.Items, ptr.Deref(s.Secret.Optional, false))
		case s.DownwardAPI != nil:
			files, err = downward(f, s.DownwardAPI.Items)
		case s.ServiceAccountToken != nil:
			var text string
			text, err = from.Tokens.Get(ctx, from.Client, f.Pod, s.ServiceAccountToken)
			files = map[string]file{s.ServiceAccountToken.Path: {data: []byte(text)}}
		default:
			err = errors.New("projected: want configMap, secret, downwardAPI or serviceAccountToken; others are not supported")
		}
		if err != nil {
			return nil, err
		}
		for k, v := range files {
			out[k] = v
		}
	}
	return out, nil
}

// Binds turns the volumeMounts of a container of the Pod into mounts; paths are the paths of the
// volumes on the machine, by name.
func Binds(pod *corev1.PodSpec, c *corev1.Container, paths map[string]string, value func(string) (string, bool)) ([]mount.Bind, error) {
	var out []mount.Bind
	var all []mounted
	for _, m := range c.VolumeMounts {
		src, ok := paths[m.Name]
		if !ok {
			return nil, fmt.Errorf("volumeMounts: no volume %q in the pod", m.Name)
		}
		sub, within := m.SubPath, ""
		if m.SubPathExpr != "" {
			sub = values.Expand(m.SubPathExpr, value)
		}
		if sub != "" {
			if !filepath.IsLocal(sub) {
				return nil, fmt.Errorf("volumeMounts %s: subPath %q leads out of the volume", m.Name, sub)
			}
			if err := makeSubPath(src, sub); err != nil {
				return nil, fmt.Errorf("volumeMounts %s: subPath: %w", m.Name, err)
			}
			// A container of the pod may put a link there now: the shim opens it again.
			within, src = src, filepath.Join(src, sub)
		}
		target := filepath.Join("/", m.MountPath)
		all = append(all, mounted{target, paths[m.Name], sub, slices.ContainsFunc(pod.Volumes, func(v corev1.Volume) bool {
			return v.Name == m.Name && v.HostPath == nil
		})})
		// The token's mount path is made on the machine where it is missing: a Pod that sees the machine's /run
		// would not see later sockets in a cover of it.
		out = append(out, mount.Bind{
			Source: src, Within: within, Target: target, ReadOnly: m.ReadOnly, Place: true, Make: target == values.TokenMountPath,
		})
	}
	makeNested(all)
	// Outer mounts first, so that inner ones are mounted over them.
	slices.SortStableFunc(out, func(a, b mount.Bind) int {
		return strings.Count(filepath.Clean(a.Target), "/") - strings.Count(filepath.Clean(b.Target), "/")
	})
	return out, nil
}

// makeSubPath makes the directory sub of a volume, if it does not exist, with owner, group
// and mode of the volume's, as kubelet does.
func makeSubPath(volume, sub string) error {
	root, err := os.OpenRoot(volume) // no link leads out of it
	if err != nil {
		return err
	}
	defer root.Close()
	if _, err := root.Stat(sub); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	top, err := root.Stat(".")
	if err != nil {
		return err
	}
	uid, gid, _ := fileio.Owner(top) // -1, which changes nothing, if unknown
	for i, c := range sub + "/" {
		at := sub[:i]
		if c != '/' || at == "" || filepath.Clean(at) == "." {
			continue
		}
		err := root.Mkdir(at, 0o700)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err == nil && (uid != os.Geteuid() || gid != os.Getegid()) {
			err = root.Lchown(at, uid, gid)
		}
		if err == nil {
			err = root.Chmod(at, top.Mode()&(fs.ModePerm|fs.ModeSetgid))
		}
		if err != nil {
			return err
		}
	}
	return nil
}
