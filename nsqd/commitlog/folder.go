package commitlog

import (
	"errors"
	"io/fs"
	"path/filepath"
)

type folder struct {
	disk   Disk
	parent string // of the Dir
	path   string
}

// file returns the path of a file in the folder.
func (f folder) file(name string) string { return filepath.Join(f.path, name) }

// make creates the log's folder unless found.
func (f folder) make(found bool) error {
	if found {
		return nil
	}
	err := f.disk.Mkdir(f.path)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// create creates a file and replaces a leftover file.
func create(disk Disk, path string) (File, error) {
	file, err := disk.Create(path)
	if errors.Is(err, fs.ErrExist) {
		if err = disk.Remove(path); err == nil {
			file, err = disk.Create(path)
		}
	}
	return file, err
}

// place makes the log's list of files durable, and also the log's folder unless found.
func (f folder) place(found bool) error {
	if !found {
		if err := f.disk.SyncDir(f.parent); err != nil {
			return err
		}
	}
	return f.disk.SyncDir(f.path)
}

func (f folder) delete(names []string) (faults []error) {
	if len(names) == 0 {
		return nil
	}
	for _, name := range names {
		if err := f.disk.Remove(f.file(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			faults = append(faults, err)
		}
	}
	if err := f.disk.SyncDir(f.path); err != nil {
		faults = append(faults, err)
	}
	return faults
}
