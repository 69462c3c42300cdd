// Command image writes a container image of fairlead as an OCI archive, without a daemon and without a base image
// (https://github.com/opencontainers/image-spec/blob/main/image-layout.md). The same programs, version and time give
// the same bytes.
//
//	image --out FILE --version VERSION --created SECONDS ARCH=PROGRAM=SBOM...
//
// Each argument is an architecture, its static program, and the program's SBOM in CycloneDX. The SBOM is attached to
// the image of its architecture as a referrer, as OCI 1.1 defines it.
package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const (
	program = "usr/bin/fairlead"
	name    = "docker.io/fairlead/fairlead" // a default that clients complete; registries of users have names of their own
	sbom    = types.MediaType("application/vnd.cyclonedx+json")
	source  = "https://github.com/fairlead/fairlead"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

// release is what all architectures of an image have in common.
type release struct {
	version string
	created time.Time
}

func run(args []string) error {
	flags := flag.NewFlagSet("image", flag.ContinueOnError)
	out := flags.String("out", "", "the archive to write")
	version := flags.String("version", "", "the version of the programs")
	created := flags.Int64("created", 0, "the time of the commit, in seconds since 1970")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *out == "" || *version == "" || flags.NArg() == 0 {
		return errors.New("usage: image --out FILE --version VERSION --created SECONDS ARCH=PROGRAM=SBOM...")
	}
	r := release{*version, time.Unix(*created, 0).UTC()}
	dir, err := os.MkdirTemp("", "fairlead-image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := r.layout(dir, flags.Args()); err != nil {
		return err
	}
	return r.archive(dir, *out)
}

// layout writes the image layout of all architectures into dir.
func (r release) layout(dir string, parts []string) error {
	images := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	var referrers []v1.Image
	for _, part := range parts {
		fields := strings.Split(part, "=")
		if len(fields) != 3 {
			return fmt.Errorf("%q is not ARCH=PROGRAM=SBOM", part)
		}
		image, err := r.image(fields[0], fields[1])
		if err != nil {
			return err
		}
		images = mutate.AppendManifests(images, mutate.IndexAddendum{
			Add: image, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: fields[0]}},
		})
		referrer, err := bill(image, fields[2])
		if err != nil {
			return err
		}
		referrers = append(referrers, referrer)
	}
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	annotations := map[string]string{"org.opencontainers.image.ref.name": r.version, "io.containerd.image.name": name + ":" + r.version}
	if err := path.AppendIndex(images, layout.WithAnnotations(annotations)); err != nil {
		return err
	}
	for _, referrer := range referrers {
		if err := path.AppendImage(referrer); err != nil {
			return err
		}
	}
	return nil
}

// image returns the image of one architecture: the program, and what a Linux program looks up about users.
func (r release) image(arch, file string) (v1.Image, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	layer, err := r.layer(content)
	if err != nil {
		return nil, err
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err = mutate.Append(image, mutate.Addendum{
		Layer: layer, History: v1.History{Created: v1.Time{Time: r.created}, CreatedBy: "make image", Comment: "fairlead " + r.version},
	})
	if err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = "linux", arch, v1.Time{Time: r.created}
	config.Config.Entrypoint = []string{"/" + program}
	config.Config.Env = []string{"PATH=/usr/bin"}
	config.Config.Labels = map[string]string{
		"org.opencontainers.image.title":    "fairlead",
		"org.opencontainers.image.source":   source,
		"org.opencontainers.image.version":  r.version,
		"org.opencontainers.image.licenses": "Apache-2.0",
	}
	return mutate.ConfigFile(image, config)
}

// layer returns the one layer of an image.
func (r release) layer(content []byte) (v1.Layer, error) {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, f := range []struct {
		name string
		mode int64
		text []byte
	}{
		{"etc/", 0o755, nil},
		{"etc/group", 0o644, []byte("root:x:0:\nnonroot:x:65532:\n")},
		{"etc/passwd", 0o644, []byte("root:x:0:0:root:/:/\nnonroot:x:65532:65532:nonroot:/:/\n")},
		{"tmp/", 0o1777, nil},
		{"usr/", 0o755, nil},
		{"usr/bin/", 0o755, nil},
		{program, 0o755, content},
	} {
		kind := byte(tar.TypeReg)
		if strings.HasSuffix(f.name, "/") {
			kind = tar.TypeDir
		}
		header := &tar.Header{Name: f.name, Typeflag: kind, Mode: f.mode, Size: int64(len(f.text)), ModTime: r.created}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.text); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(buf.Bytes())), nil }
	return tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer))
}

// bill returns the SBOM in file as an artifact that refers to image.
func bill(image v1.Image, file string) (v1.Image, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	subject, err := partial.Descriptor(image)
	if err != nil {
		return nil, err
	}
	artifact := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), sbom)
	artifact, err = mutate.AppendLayers(artifact, static.NewLayer(text, sbom))
	if err != nil {
		return nil, err
	}
	return mutate.Subject(artifact, *subject).(v1.Image), nil
}

// archive writes the files of a layout into a tar archive, by name.
func (r release) archive(dir, file string) (err error) {
	out, err := os.Create(file)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	w := tar.NewWriter(out)
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		header := &tar.Header{Name: filepath.ToSlash(relative), Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(content)), ModTime: r.created}
		if err := w.WriteHeader(header); err != nil {
			return err
		}
		_, err = w.Write(content)
		return err
	})
	if err != nil {
		return fmt.Errorf("cannot write %s (%s): %w", file, strconv.Quote(r.version), err)
	}
	return w.Close()
}
